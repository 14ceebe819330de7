"""The style sheet of the report page."""

STYLE = """
:root {
  color-scheme: light dark;
  --ground: #fff; --ink: #1b1f24; --soft: #5b6570; --line: #dfe3e8;
  --best: #e3f1fa; --ahead: #00664a; --behind: #b04300; --warn: #fff4d6;
}
@media (prefers-color-scheme: dark) {
  :root {
    --ground: #14171a; --ink: #e6e9ec; --soft: #9aa4ae; --line: #30363d;
    --best: #173447; --ahead: #4fd0a5; --behind: #ff9a5c; --warn: #3a3013;
  }
  figure img { filter: invert(1) hue-rotate(180deg); }
}
* { box-sizing: border-box; }
body { margin: 0; background: var(--ground); color: var(--ink); }
body { font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 96rem; margin: 0 auto; padding: 2rem 1rem 4rem; }
h1 { font-size: 1.8rem; line-height: 1.2; margin: 0 0 .5rem; overflow-wrap: anywhere; }
h2 { font-size: 1.2rem; margin: 2.5rem 0 .5rem; }
.lead { color: var(--soft); max-width: 60rem; margin: 0 0 1.5rem; overflow-wrap: anywhere; }
.note, figcaption { color: var(--soft); font-size: .85rem; }
.wide { overflow-x: auto; scrollbar-width: thin; scrollbar-color: var(--soft) var(--line); }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; }
th, td { padding: .35rem .5rem; border-bottom: 1px solid var(--line); }
th, td { text-align: right; white-space: nowrap; }
thead th { color: var(--soft); font-weight: 500; vertical-align: bottom; border-bottom-width: 2px; }
thead th { white-space: normal; }
tbody th[scope=row] { position: sticky; left: 0; background: var(--ground); }
.name, .text { text-align: left; }
.text { white-space: normal; overflow-wrap: anywhere; }
tbody th { font-weight: 600; }
.best { background: var(--best); font-weight: 600; }
.ahead { color: var(--ahead); }
.behind { color: var(--behind); }
.even { color: var(--soft); }
.figures { display: grid; gap: 1.5rem; margin: 2rem 0 1rem; }
.figures { grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); }
figure { margin: 0; break-inside: avoid; }
figure img { display: block; width: 100%; max-width: 40rem; height: auto; margin: 0 auto; }
figcaption { max-width: 36rem; margin: .3rem auto 0; }
aside { background: var(--warn); border-radius: .5rem; padding: .8rem 1rem; margin: 0 0 1.5rem; }
aside { font-size: .9rem; overflow-wrap: anywhere; }
aside ul { margin: .3rem 0 0; }
details { margin: .6rem 0; }
summary { cursor: pointer; color: var(--soft); }
pre { overflow-x: auto; padding: .8rem 1rem; font-size: .85rem; }
pre { border: 1px solid var(--line); border-radius: .5rem; }
@media print {
  main { max-width: none; padding: 0; }
  table { font-size: 7pt; }
  th, td { padding: .15rem .25rem; white-space: normal; }
  pre { white-space: pre-wrap; }
}
"""
