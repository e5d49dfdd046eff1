"""`tilewright inspect grammar`: who makes the masks of which grammar, and why."""

from pathlib import Path

from cli.conftest import Run

COMMAND = ("inspect", "grammar")


def test_who_makes_masks_and_why(run: Run, tmp_path: Path):
    (color := tmp_path / "color.json").write_text('{"enum": ["red", "green"]}', encoding="utf-8")
    (day := tmp_path / "day.json").write_text('{"type": "string", "format": "date"}', encoding="utf-8")
    said = run(*COMMAND, color, day, "--regex", "[ab]{2}", r"\w", "--json", "-").json
    assert (said["model"], said["tokens"]) == ("demo", 4096)
    rows = {row["name"]: row for row in said["grammars"]}
    assert {name: row["masks"] for name, row in rows.items()} == {
        str(color): "device",
        str(day): "host",
        "[ab]{2}": "device",
        r"\w": "host",
    }
    assert (rows[str(day)]["why"], rows[str(day)]["states"]) == ("the keywords 'format'", None)
    assert rows["[ab]{2}"]["brackets"] is None
    assert rows["[ab]{2}"]["states"] == 3


def test_how_deep_json_goes(run: Run):
    ran = run(*COMMAND)
    (line,) = (line.split() for line in ran.out.splitlines() if "any JSON object" in line)
    assert line[3:5] == ["device", "3"]


def test_what_is_no_grammar_is_named(run: Run, tmp_path: Path):
    (list_ := tmp_path / "list.json").write_text("[]", encoding="utf-8")
    (never := tmp_path / "never.json").write_text('{"type": "integer", "minimum": 5, "maximum": 3}', encoding="utf-8")
    for file, message in ((list_, f"{list_}: expected a schema"), (never, "minimum"), (tmp_path, "directory")):
        ran = run(*COMMAND, file)
        assert ran.status == 2
        assert message in ran.err.replace("\n", "")
