"""Asynchronous operations in flight: queues whose heads may complete at any time the scheduler likes."""

from collections import deque


class Operation:
    """One piece of asynchronous work. `finish()` makes its result visible; `ready()` says whether it may (collective
    operations wait).
    """

    def __init__(self, finish, what, ready=None):
        self.finish, self.what = finish, what
        self.ready = ready or (lambda: True)


class Engine:
    """Independent queues, each in order. A copy is a queue of its own; a warp's MMAs share one."""

    def __init__(self):
        self.queues = {}
        self.fresh = 0

    def submit(self, operation, key=None):
        if key is None:
            self.fresh += 1
            key = ("free", self.fresh)
        self.queues.setdefault(key, deque()).append(operation)

    def candidates(self):
        return [k for k, q in self.queues.items() if q[0].ready()]

    def complete(self, key):
        """Finish the head of a queue."""
        queue = self.queues[key]
        operation = queue.popleft()
        if not queue:
            del self.queues[key]
        operation.finish()

    def __len__(self):
        return len(self.queues)
