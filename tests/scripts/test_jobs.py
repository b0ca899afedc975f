"""Jobs run in processes of their own, so many at a time, and one that fails takes no other with it."""

import time
from itertools import pairwise

import pytest

from scripts._jobs import Job, run_jobs
from tests.scripts import jobs


def make(tmp_path, *works):
    folders = [tmp_path / str(i) for i in range(len(works))]
    for folder in folders:
        folder.mkdir()
    return [Job(folder.name, work, folder) for folder, work in zip(folders, works)]


def test_a_job_that_fails_is_told_and_stops_no_other(tmp_path):
    made, ended = make(tmp_path, jobs.fail, jobs.write, jobs.die, jobs.write), {}
    run_jobs(made, 2, lambda job, failure: ended.update({job.name: failure}))
    assert ended == {"0": "in two lines", "1": "", "2": "its process was ended by signal 9", "3": ""}
    assert "ValueError: the reason" in made[0].output.read_text() and made[1].output.read_text() == "at work\n"
    times = [tuple(map(float, (made[i].folder / "done").read_text().split())) for i in (1, 3)]
    assert all(began < end for began, end in times)


def test_no_more_jobs_run_at_once_than_processes(tmp_path):
    made = make(tmp_path, *[jobs.write] * 3)
    run_jobs(made, 1, lambda job, failure: None)
    times = [tuple(map(float, (job.folder / "done").read_text().split())) for job in made]
    assert all(end <= began for (_, end), (began, _) in pairwise(times))


def test_an_interrupt_reaches_the_running_jobs_and_starts_no_other(tmp_path):
    made = make(tmp_path, jobs.wait, jobs.write, jobs.write)

    def interrupt(job, failure):
        while not (tmp_path / "0" / "begun").exists():
            time.sleep(0.05)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_jobs(made, 2, interrupt)
    assert (tmp_path / "0" / "interrupted").exists() and not (tmp_path / "2" / "done").exists()
