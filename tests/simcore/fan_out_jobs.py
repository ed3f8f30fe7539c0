"""Work for test_parallel: at module level, so that another process can import it."""

import os
import time

from simcore.errors import BadInput, PolicyError, TraceError


def square(job, progress):
    progress(0.5)
    time.sleep(0.02 * (job % 3 == 0))  # so that jobs do not end in the order in which they began
    return job, job**2, os.getpid()


def refuse(job, progress):
    progress(0.25)
    if job == "bad input":
        raise TraceError("trace.csv:7", "output_tokens", found=-3, allowed="at least 1")
    if job == "policy":
        raise PolicyError("Hold", 1.5, "pin of block 7, which is free")
    if job == "plain":
        raise KeyError("lost")
    if job == "dies":
        os._exit(3)
    if job == "endless":
        time.sleep(600)
    return job


class Unsendable(Exception):
    """Cannot be rebuilt from its `args`, as an exception of a user's may be."""

    def __init__(self, one, two):
        super().__init__("odd")


def unsendable(job, progress):
    raise Unsendable(1, 2)


def large(job, progress):
    if job[0] == 0:
        raise BadInput("first")
    time.sleep(600)


def fails_among_large_jobs():
    """Jobs that do not fit into a pipe; the first fails at once, the others would take long and are waiting to be sent."""
    from simcore.parallel import fan_out

    load = b"x" * 60_000_000
    for _ in range(3):  # whether it hung was a race
        try:
            fan_out(large, [(number, load) for number in range(8)], processes=2)
        except BadInput as error:
            print("raised", error)
