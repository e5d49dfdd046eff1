"""The script that sets two checkouts against each other, with checkouts that only write what they are told."""

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "against.py"
spec = importlib.util.spec_from_file_location("against", SCRIPT)
assert spec is not None
assert spec.loader is not None
against: Any = importlib.util.module_from_spec(spec)
sys.modules["against"] = against
spec.loader.exec_module(against)

MAIN = """
import json, sys
def main():
    values = {values!r}
    with open({log!r}, "a") as log:
        log.write({name!r} + " " + " ".join(sys.argv[1:3]) + "\\n")
    with open({log!r}) as log:
        n = sum(line.startswith({name!r} + " " + " ".join(sys.argv[1:3])) for line in log) - 1
    with open(sys.argv[sys.argv.index("--json") + 1], "w") as file:
        json.dump(values[sys.argv[2]][n], file)
"""


def checkout(folder: Path, name: str, values: dict[str, list[dict[str, Any]]]) -> Path:
    """A checkout whose commands write `values` one after the other, and note that they ran."""
    package = folder / name / "src" / "tilewright" / "cli"
    package.mkdir(parents=True)
    for init in (package, package.parent):
        (init / "__init__.py").touch()
    (package / "main.py").write_text(MAIN.format(values=values, log=str(folder / "log"), name=name))
    return folder / name


def graphs(*medians: float) -> list[dict[str, Any]]:
    named = {"experiment": "gcn", "name": "fused"}
    return [{"data": [{**named, "median_ms": median}]} for median in medians]


def drafters(*rates: float, old: bool) -> list[dict[str, Any]]:
    """Older versions name the batch size once for the whole file, and newer ones have a record more."""
    row = {"dataset": "code", "drafter": "dflash"}
    more = [] if old else [{**row, "batch_size": 8, "drafter": "eagle3", "tokens_per_s": 1.0}]
    named = {} if old else {"batch_size": 8}
    return [{"batch_size": 8 if old else [8], "data": [{**row, **named, "tokens_per_s": rate}, *more]} for rate in rates]


def test_checkouts_take_turns_and_each_repetition_gives_a_quotient(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    old = checkout(tmp_path, "old", {"graph": graphs(2, 4, 9), "speculative": drafters(10, 20, 30, old=True)})
    new = checkout(tmp_path, "new", {"graph": graphs(1, 4, 3), "speculative": drafters(20, 20, 15, old=False)})
    commands = ("bench graph --rows 1", "bench speculative")
    against.main(old=old, new=new, command=commands, repetitions=3, json_file=str(tmp_path / "out.json"))
    ran = (tmp_path / "log").read_text().splitlines()
    turn = ["old bench graph", "new bench graph", "old bench speculative", "new bench speculative"]
    assert ran == [*turn, *reversed(turn), *turn]
    written = json.loads((tmp_path / "out.json").read_text())
    names = ("command", "record", "figure", "old", "new", "speed", "speed_range")
    assert [tuple(row[name] for name in names) for row in written["data"]] == [
        (commands[0], "gcn, fused", "median_ms", 4, 3, 2, [1, 3]),
        (commands[1], "code, 8, dflash", "tokens_per_s", 20, 20, 1, [0.5, 2]),
    ]
    assert written["on_one_side_only"] == ["bench speculative: code, 8, eagle3, tokens_per_s"]
    shown = capsys.readouterr().out
    assert "0.50 to 2.00" in shown
    assert "in one checkout only" in shown


def test_each_checkout_runs_its_own_script(tmp_path: Path):
    for name, rate in (("old", 10), ("new", 30)):
        script = checkout(tmp_path, name, {}) / "benchmarks" / "engine_speed.py"
        script.parent.mkdir()
        rates = {f"{way}_tokens_per_s": rate for way in ("standalone", "engine", "http", "eight")}
        record = {"model": "demo", "drafter": "none", "dtype": "float32", **rates}
        script.write_text(
            f"import pathlib, sys\npathlib.Path(sys.argv[sys.argv.index('--json') + 1]).write_text({json.dumps(record)!r})"
        )
    given = {"old": tmp_path / "old", "new": tmp_path / "new", "repetitions": 1}
    against.main(**given, command=("engine_speed --prompts 1",), json_file=str(tmp_path / "out.json"))
    written = json.loads((tmp_path / "out.json").read_text())
    assert {(row["record"], row["speed"]) for row in written["data"]} == {("demo, none, float32", 3)}
    assert len(written["data"]) == 4


def test_a_command_that_fails_ends_the_run(tmp_path: Path):
    broken = checkout(tmp_path, "old", {})
    with pytest.raises(SystemExit, match="bench graph ended with 1\n"):
        against.main(old=broken, new=broken, command=("bench graph",), repetitions=1)


@pytest.mark.parametrize(
    ("command", "problem"), [("generate x", "found 'generate x'"), ("bench", "found 'bench'"), ("bench x", "found 'bench x'")]
)
def test_only_benchmarks_can_be_compared(tmp_path: Path, command: str, problem: str):
    some = checkout(tmp_path, "some", {})
    with pytest.raises(ValueError, match=problem):
        against.main(old=some, new=some, command=(command,))
    with pytest.raises(ValueError, match="without src/tilewright"):
        against.main(old=tmp_path, new=some, command=("bench graph",))
