"""Reports of runs, made from their records alone: statistics, tables, figures and pages."""
