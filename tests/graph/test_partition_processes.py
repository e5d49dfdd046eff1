"""Two processes of two devices each, with Gloo between them."""

from pathlib import Path

from parallel.processes import run_two


def test_two_processes_reach_what_one_device_does():
    said = run_two(Path(__file__).with_name("partition_process.py"))
    assert all("equal to one device" in text for text in said), "\n".join(said)
