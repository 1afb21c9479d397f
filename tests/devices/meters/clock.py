"""A clock that goes on when it is told to."""


class Clock:
    def __init__(self):
        self.seconds = 0.0

    def now(self):
        return self.seconds

    def go_on(self, seconds):
        self.seconds += seconds
