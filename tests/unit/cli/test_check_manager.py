"""``kvtiers check`` on a tier of the third rung: stepped as an engine would, and its mistakes are lines."""

import pytest

MANAGER = """
from pathlib import Path
from kvtiers.api import JobResult, LookupResult, SecondaryTierManager, TransferJob

class Manager(SecondaryTierManager):
    def __init__(self, context):
        self.context, self.values, self.jobs, self.step, self.asked = context, {}, [], 0, set()

    def row(self, job):
        start = job.chunk_ids[0] * self.context.row_stride
        return self.context.region[start:start + self.context.value_bytes]

    def lookup(self, key, request):
        if key not in self.asked:
            self.asked.add(key)
            return LookupResult.RETRY
        return LookupResult.HIT if key in self.values else LookupResult.MISS

    def submit_store(self, job):
        self.jobs.append(job)

    def submit_load(self, job):
        self.jobs.append(job)

    def on_schedule_end(self):
        self.step += 1

    def get_finished_jobs(self):
        if self.step % 3:
            return []
        done, self.jobs = self.jobs, []
        return [self.move(job) for job in done]

    def move(self, job):
        if job.is_promotion:
            self.row(job)[:] = self.values[job.keys[0]]
        else:
            self.values[job.keys[0]] = bytes(self.row(job))
        return JobResult(job.job_id, True)

    def drain(self, timeout):
        return not self.jobs

class Mine(Manager):
"""


@pytest.fixture
def check(run, config, distributions):
    """Check a tier whose manager has this body; return the result."""

    def start(body: str = "", options: str = "", arguments: tuple[str, ...] = (), tier: str = "peers"):
        lines = "\n".join(f"    {line}" for line in body.strip("\n").splitlines()) or "    pass"
        distributions.tier(tier, kind="manager", opened=f"{MANAGER}{lines}\nreturn Mine(context)")
        return run("check", config(f"{{type: {tier}{options}}}"), *arguments)

    return start


def errors(result) -> list[str]:
    return [line for line in result.stdout.splitlines() if line.split()[:1] == ["error"]]


def test_a_manager_that_needs_several_steps_for_everything_passes(check):
    result = check()
    assert result.exit_code == 0, result.output
    assert "stored, loaded and compared 2MiB" in result.stdout


def test_a_read_only_manager_is_only_asked(check):
    result = check("def submit_store(self, job): raise AssertionError\nsubmit_load = submit_store", ", read_only: true")
    assert result.exit_code == 0, result.output
    assert "read-only: it answers lookups" in result.stdout


def test_a_manager_is_notified_of_the_request_and_drained_and_closed(check, tmp_path):
    result = check(
        f"""
def log(self, what):
    with Path("{tmp_path}/log").open("a") as file:
        file.write(what + " ")
def on_new_request(self, request): self.log("new")
def on_request_finished(self, request): self.log("finished")
def drain(self, timeout): self.log("drain")
def close(self): self.log("close")
"""
    )
    assert result.exit_code == 0, result.output
    assert (tmp_path / "log").read_text() == "new finished drain close "


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (
            "def lookup(self, key, request): return LookupResult.HIT",
            "of a key that is not there gave hit, expected miss",
        ),
        ("def lookup(self, key, request): return LookupResult.MISS", "of the stored probe key gave miss, expected hit"),
        ("def move(self, job): return JobResult(job.job_id, False)", "reports that the job has failed"),
        ("def move(self, job): return JobResult(77, True)", "the finished jobs gave [77], expected [1]"),
        (
            "def get_finished_jobs(self): return [self.move(self.jobs[0])] * 2",
            "the finished jobs gave [1, 1], expected [1]",
        ),
        (
            "def submit_store(self, job): raise OSError('no wire')",
            "failed while storing the probe value: no wire (OSError)",
        ),
        (
            "def submit_load(self, job): raise OSError('no wire')",
            "failed while loading the probe value: no wire (OSError)",
        ),
        (
            "def move(self, job):\n    return JobResult(job.job_id, True) if job.is_promotion else super().move(job)",
            "the value read back is not the value written",
        ),
        (
            "def move(self, job):\n    result = super().move(job)\n    self.row(job)[0] ^= 1\n    return result",
            "the value read back is not the value written",
        ),
        (
            "def move(self, job):\n    self.context.region[0] ^= job.is_promotion\n    return super().move(job)",
            "the tier changed the memory that it was to write from",
        ),
    ],
)
def test_what_a_manager_gets_wrong_is_one_line(check, body, said):
    result = check(body)
    assert result.exit_code == 1
    (line,) = errors(result)
    assert said in line
    assert ". Fix: " in line


def test_a_manager_that_never_reports_is_a_line(check):
    # The shortest time in which this machine starts the tier's process: all of it is waited out.
    for seconds in (4, 16, 64):
        limit = ("--timeout", f"{seconds}s")
        result = check("def get_finished_jobs(self): return []", arguments=limit, tier=f"peers{seconds}")
        assert result.exit_code == 1
        (line,) = errors(result)
        if "while being started" not in line:
            break
    assert f"no answer within {seconds}s while storing the probe value" in line
