"""Counters and states from directories that look like sysfs and /proc."""

import threading
from pathlib import Path

from stepkeeper.node_agent.kernel import EvidenceReader, Roots, gpu_addresses, news, read_counters
from stepkeeper.node_agent.readings import Evidence
from tests.node_agent.sensors.collect import Collected

GPU = "0000:3b:00.0"


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        whole = root / "about-to-be"  # a reader sees the file before or after, as in sysfs
        whole.write_text(text)
        whole.replace(path)


def node(root: Path) -> Roots:
    devices = "sys/bus/pci/devices"
    write(
        root,
        {
            f"{devices}/{GPU}/vendor": "0x10de\n",
            f"{devices}/{GPU}/class": "0x030200\n",
            f"{devices}/{GPU}/aer_dev_correctable": "RxErr 3\nBadTLP 0\nTOTAL_ERR_COR 3\n",
            f"{devices}/{GPU}/aer_dev_fatal": "Undefined 0\nTOTAL_ERR_FATAL 0\n",
            f"{devices}/0000:3c:00.0/vendor": "0x10de\n",  # NVIDIA's, but a bridge
            f"{devices}/0000:3c:00.0/class": "0x068000\n",
            f"{devices}/0000:00:02.0/vendor": "0x8086\n",
            f"{devices}/0000:00:02.0/class": "0x030000\n",
            "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
            "sys/class/infiniband/mlx5_0/ports/1/phys_state": "5: LinkUp\n",
            "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
            "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed": "1\n",
            "sys/class/infiniband/mlx5_0/ports/1/counters/symbol_error": "0\n",
            "proc/pressure/memory": "some avg10=1.50 avg60=0.10 total=10\nfull avg10=0.50 avg60=0 total=3\n",
        },
    )
    return Roots(sys=root / "sys", proc=root / "proc", disks=(str(root),))


def by_what(found: tuple[Evidence, ...]) -> dict[str, Evidence]:
    return {evidence.what: evidence for evidence in found}


def test_everything_that_a_node_tells_is_read(tmp_path: Path) -> None:
    roots = node(tmp_path)
    assert gpu_addresses(roots) == (GPU,)
    found = by_what(read_counters(roots))
    assert found["aer"].where == GPU
    assert found["aer"].values == {"correctable": 3, "fatal": 0}
    assert found["infiniband"].where == "mlx5_0/1"
    assert found["infiniband"].values == {"active": 1, "link_downed": 1, "symbol_error": 0}
    assert found["infiniband"].text == "InfiniBand active, linkup"
    assert found["memory_pressure"].values == {"some": 1.5, "full": 0.5}
    assert 0 < found["disk"].values["free"] <= found["disk"].values["size"]


def test_a_node_that_tells_nothing_is_fine(tmp_path: Path) -> None:
    assert read_counters(Roots(sys=tmp_path / "sys", proc=tmp_path / "proc", disks=(str(tmp_path / "none"),))) == ()


def test_torn_and_strange_files_are_left_out(tmp_path: Path) -> None:
    roots = node(tmp_path)
    device = f"sys/bus/pci/devices/{GPU}"
    write(
        tmp_path,
        {
            f"{device}/aer_dev_correctable": "TOTAL_ERR_COR many\n",
            f"{device}/aer_dev_fatal": "\xff",
            "sys/class/infiniband/mlx5_0/ports/1/state": "",
            "proc/pressure/memory": "some avg10=x\n",
        },
    )
    found = by_what(read_counters(roots))
    assert set(found) == {"memory_pressure", "disk"}
    assert found["memory_pressure"].values == {"some": 0.0}


def test_only_what_became_worse_is_news(tmp_path: Path) -> None:
    roots = node(tmp_path)
    before = read_counters(roots)
    assert news((), before) == ()  # counters of the past say nothing
    assert news(before, before) == ()
    write(
        tmp_path,
        {
            f"sys/bus/pci/devices/{GPU}/aer_dev_correctable": "TOTAL_ERR_COR 10\n",
            "sys/class/infiniband/mlx5_0/ports/1/state": "1: DOWN\n",
            "sys/class/infiniband/mlx5_0/ports/1/counters/link_downed": "2\n",
            "proc/pressure/memory": "some avg10=40.00 total=1\n",
        },
    )
    after = read_counters(roots)
    found = by_what(news(before, after))
    assert "correctable grew by 7" in found["aer"].text
    assert "the link went down, link_downed grew by 1" in found["infiniband"].text
    assert "above 10 %" in found["memory_pressure"].text
    assert set(found) == {"aer", "infiniband", "memory_pressure"}
    assert [evidence.text for evidence in news(after, before)] == [
        "InfiniBand active, linkup; the link came up"
    ]  # smaller counters are a reset of the adapter


def test_a_disk_is_news_when_it_becomes_full() -> None:
    def disk(free: float) -> Evidence:
        return Evidence(at=0, what="disk", where="/", text="", values={"free": free, "size": 1000})

    assert not news([disk(500)], [disk(30)])
    assert news([disk(30)], [disk(10)])
    assert not news([disk(10)], [disk(9)])
    assert news([], [disk(1)])


def test_the_reader_tells_news_and_keeps_the_latest(tmp_path: Path) -> None:
    roots = node(tmp_path)
    seen = Collected()
    looked = threading.Event()
    reader = EvidenceReader(seen, roots=roots, every_s=0.02, on_failure=print)
    reader.start()
    try:
        while not reader.latest:
            looked.wait(0.01)
        write(tmp_path, {f"sys/bus/pci/devices/{GPU}/aer_dev_fatal": "TOTAL_ERR_FATAL 1\n"})
        assert "fatal grew by 1" in seen.wait_for(Evidence).text
        assert by_what(reader.latest)["aer"].values["fatal"] == 1
    finally:
        reader.stop()
    assert len(seen) == 1
