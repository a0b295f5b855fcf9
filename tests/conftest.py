import pytest

from tests.lab import Lab, LabOptions, processes
from tests.lab.cluster import recorded
from tests.lab.requirements import missing, required


@pytest.fixture(scope="session", autouse=True)
def nothing_leaks():
    """A daemon of a lab that outlives the tests is a bug."""
    yield
    left = [pid for pid, started in recorded if processes.alive(pid, started)]
    assert not left, f"processes of a lab still run: {left}"


@pytest.fixture(scope="session")
def slurm():
    """Whatever needs a lab asks for this: skips with the reason, or fails where Slurm must be there."""
    if problems := missing():
        reason = "; ".join(problems)
        (pytest.fail if required() else pytest.skip)(reason)


@pytest.fixture(scope="session")
def lab_factory(slurm):
    """Bring up labs of one's own choice; they go down at the end of the session."""
    labs = []

    def make(options: LabOptions | None = None) -> Lab:
        labs.append(Lab(options).up())
        return labs[-1]

    yield make
    for lab in labs:
        lab.down()
