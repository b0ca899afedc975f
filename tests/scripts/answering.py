"""A process that `tests/scripts/test_child.py` asks."""

import os
import time

from scripts._bench.child import answer


def work(job, tell):
    print("noise from a library")
    tell({"doubled": 2 * job["number"]})
    if job.get("then") == "fail":
        raise ValueError("as told")
    if job.get("then") == "die":
        os._exit(3)
    if job.get("then") == "sleep":
        time.sleep(600)


if __name__ == "__main__":
    answer(work)
