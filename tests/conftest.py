"""Shared test settings: one torch thread, so that parallel test processes do not compete for cores;
no deadline per example; and a callback that keeps all events of a run."""

import pytest
import torch
from hypothesis import settings

import fedspd

torch.set_num_threads(1)
settings.register_profile("fedspd", deadline=None)
settings.load_profile("fedspd")


class EventLog(fedspd.Callback):
    """The callback that keeps all events of a run, in order."""

    def __init__(self):
        self.events = []
        self.alarms = []

    def on_start(self, event):
        self.events.append(event)

    on_round = on_final = on_start

    def on_alarm(self, round, alarm):
        self.alarms.append((round, alarm))


@pytest.fixture
def event_log():
    return EventLog()
