"""What a report says of a run, or of two; of runs that were cut off as well; and that what a model wrote stays text."""

import json
import math
import re
from html.parser import HTMLParser

import pytest

from hybridflow import cli
from hybridflow.report.charts import POINTS, thin
from hybridflow.report.folder import read_run
from hybridflow.report.page import render, report
from tests.report.runs import HOSTILE, sample, write_run


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("runs") / "first")


class Page(HTMLParser):
    """The page's text by section, every tag with its attributes, and what the scripts hold."""

    def __init__(self, page: str):
        super().__init__()
        self.tags: list[tuple[str, dict]] = []
        self.sections: dict[str, str] = {}
        self.scripts: list[str] = []
        self._section, self._inside = "", ""
        self.feed(page)

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        self._inside = tag
        if tag == "section":
            self._section = dict(attributes)["id"]

    def handle_endtag(self, tag):
        self._inside = ""

    def handle_data(self, data):
        if self._inside == "script":
            self.scripts.append(data)
        elif self._inside != "style":
            self.sections[self._section] = " ".join((self.sections.get(self._section, "") + " " + data).split())

    @property
    def data(self) -> dict:
        return json.loads(self.scripts[0])

    def chart(self, title: str) -> dict:
        return next(chart for chart in self.data["charts"] if chart["title"] == title)


def page_of(*folders) -> Page:
    return Page(render([read_run(folder) for folder in folders]))


def test_a_run(run, capsys):
    assert cli.main(["report", str(run)]) == 0
    assert capsys.readouterr().out == f"wrote {run}/report.html\n"
    page = Page((run / "report.html").read_text())
    top = page.sections[""]
    assert "finished: 12 of 12 steps" in top and "0.500 → 1.000" in top and "2 held-out problems" in top
    assert "25.0%" in top and "3.00 GiB" in top and "1 of 1 equal" in top and "3.5 s" in top
    rewards = page.chart("Reward")["series"]
    assert rewards[0]["points"] == [[step, pytest.approx(1 - math.exp(-step / 10), rel=1e-5)] for step in range(1, 13)]
    assert (rewards[1]["label"], rewards[1]["points"]) == ("greedy accuracy", [[0, 0.5], [12, 1.0]])
    assert page.chart("Loss of the warm start")["series"][0]["points"] == [[1, 3.0], [2, 1.5]]
    assert page.chart("Pipeline bubble of the actor's updates")["series"][1]["points"][0] == [1, 40.0]
    layers = {layer["label"]: layer["points"][1] for layer in page.chart("Seconds by phase")["layers"]}
    assert layers == {"rollout": [2, 2.0], "update": [2, 1.0], "outside of phases": [2, 0.5]}
    assert "where roles run" in page.sections["placement"]
    assert "higher for 1 of 2 problems, lower for 0, the same for 1" in page.sections["samples"]
    assert "12+1" in page.sections["samples"] and "Rollouts of step 12" in page.sections["samples"]
    assert "model.path models/m (none)" in page.sections["config"]
    assert "megatron-core" in page.sections["versions"] and "commit" in page.sections["versions"]
    assert page.chart("driver/bytes_sent")["series"][0]["points"][-1] == [12, 12000]  # no metric is left out


def test_two_runs(run, tmp_path):
    other = write_run(tmp_path / "second", 8, profile=False, batch="{prompts: 8}")
    page = page_of(run, other)
    assert "finished: 8 of 8 steps" in page.sections[""] and "first" in page.sections[""]
    assert [series["run"] for series in page.chart("Loss of the actor")["series"]] == [0, 1]
    assert [chart["run"] for chart in page.data["charts"] if chart["kind"] == "stack"] == [0, 1]
    assert (
        "batch.prompts 32 8" in page.sections["config"] and "sampling" not in page.sections["config"].partition(": config")[0]
    )
    assert "second: the bubble was not measured" in page.sections["pipeline"]
    assert page_of(run, run).data["runs"] == ["first", "first"]


def test_the_page_of_two_runs_leaves_that_of_one_alone(run, tmp_path, capsys):
    other = write_run(tmp_path / "second", 3)
    alone = report([run], None).read_bytes()
    assert cli.main(["report", str(run), str(other)]) == 0
    assert capsys.readouterr().out == f"wrote {run}/report-with-second.html\n"
    assert (run / "report.html").read_bytes() == alone
    assert Page((run / "report-with-second.html").read_text()).data["runs"] == ["first", "second"]


def test_runs_of_one_name_are_told_apart(run, tmp_path):
    other = write_run(tmp_path / "first", 3)
    page = Page(report([run, other], tmp_path / "out.html").read_text())
    assert page.data["runs"] == [str(run), str(other)]


def test_what_a_model_wrote_stays_text(tmp_path):
    page = page_of(write_run(tmp_path / "run", 3, HOSTILE, data=json.dumps({"system_prompt": HOSTILE})))
    assert [tag for tag, _ in page.tags].count("script") == 2 and "img" not in dict(page.tags)
    assert page.sections["samples"].count("document.title = 'owned'") == 4  # the response twice, with two of them
    assert "document.title = 'owned'" in page.sections["config"]
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on") or name == "style"]
    policy = next(attributes["content"] for tag, attributes in page.tags if "http-equiv" in attributes)
    assert policy.startswith("default-src 'none'; script-src 'sha256-") and "unsafe" not in policy
    addresses = [value for _, a in page.tags for name, value in a.items() if name in ("src", "href")]
    assert addresses and all(address.startswith("#") for address in addresses)


def test_a_run_that_was_killed(run, tmp_path):
    killed = tmp_path / "killed"
    killed.mkdir()
    lines = (run / "metrics.jsonl").read_text().splitlines()[:6]
    broken = [json.loads(line) for line in lines]
    broken[2]["actor/loss"], broken[3]["actor/loss"], broken[4]["reward/mean"] = math.nan, -math.inf, math.nan
    whole = "".join(json.dumps(row) + "\n" for row in broken)
    (killed / "metrics.jsonl").write_text(whole + "[1]\n\0\0\0\n" + lines[-1][:40])
    (killed / "config.yaml").write_text("run: {steps: 9\n")
    (killed / "versions.json").write_text("[" * 100_000)
    row = json.dumps(sample(1, "train", "p", "a", "half \ud83d of a pair", math.nan))
    (killed / "samples.jsonl").write_text(row + "\n" + "{}\n")
    path = report([killed], None)
    page = Page(path.read_text())
    top = page.sections[""]
    assert "no summary.json: the run was killed, or it still goes on" in top
    assert "the last line (line 9) is cut off" in top and "2 lines (7, 8)" in top and "config.yaml cannot be read" in top
    assert "actor/loss is NaN or infinite in 2 steps (3, 4)" in top and "samples.jsonl: 1 line (2)" in top
    loss = page.chart("Loss of the actor")["series"][0]
    assert [step for step, _ in loss["points"]] == [1, 2, 5, 6] and loss["bad"] == [3, 4]
    assert "killed: no evaluation" in page.sections["learning"] and "placement.txt is not there" in page.sections["placement"]
    assert "half ? of a pair" in page.sections["samples"] and "versions.json cannot be read: maximum recursion" in top
    assert "NaN" not in page.scripts[0] and "Infinity" not in page.scripts[0]


def test_a_summary_of_no_seconds(run, tmp_path):
    for name in ("metrics.jsonl", "config.yaml"):
        (tmp_path / name).write_text((run / name).read_text())
    (tmp_path / "summary.json").write_text('{"steps": 12, "seconds": NaN}')
    assert "in all" not in page_of(tmp_path).sections["learning"]


def test_a_run_without_steps(run, tmp_path):
    folder = tmp_path / "empty"
    folder.mkdir()
    (folder / "config.yaml").write_text((run / "config.yaml").read_text())
    page = page_of(folder)
    assert page.data["charts"] == []
    assert "0 of 12 steps" in page.sections[""] and "has no steps" in page.sections["learning"]
    assert "No times" in page.sections["time"] and "No memory" in page.sections["memory"]
    assert page_of(folder, run).chart("Reward")["series"][0]["run"] == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["nowhere"], "nowhere is no folder"),
        (["."], "holds no run (none of config.yaml, metrics.jsonl, checkpoints is there); first hold one"),
        (["first", "first/plots"], "first/plots holds no run"),
        (["first", "--out", "nowhere/x.html"], "--out nowhere/x.html cannot be written (No such file or directory)"),
    ],
)
def test_what_is_no_run_is_one_line_and_status_2(run, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(run.parent)
    assert cli.main(["report", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.startswith("hybridflow: error: ") and message in error and error.count("\n") == 1


def test_many_steps_are_thinned(run, tmp_path):
    folder = tmp_path / "long"
    folder.mkdir()
    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    with (folder / "metrics.jsonl").open("w") as file:
        for step in range(1, 10_001):
            file.write(json.dumps(row | {"step": step, "actor/loss": 50.0 if step == 5_000 else 1.0}) + "\n")
    page = page_of(folder)
    for chart in page.data["charts"]:
        assert all(len(part["points"]) <= POINTS for part in chart.get("series", chart.get("layers")))
    points = page.chart("Loss of the actor")["series"][0]["points"]
    assert points[0] == [1, 25, 1.0, 1.0, 1.0] and points[-1][:2] == [9976, 10_000]
    assert [4976, 5000, pytest.approx(1 + 49 / 25), 1.0, 50.0] in points  # a single step's spike is still seen
    assert "mean of 25 steps" in page.sections["learning"]


def test_thinning_keeps_few_points_as_they_are_and_skips_what_is_not_there():
    assert thin([(1, 0.123456789), (3, 2.0)], 1) == [[1, 0.123457], [3, 2.0]]
    assert thin([(1, 1.0), (2, 3.0), (9, 5.0)], 4) == [[1, 2, 2.0, 1.0, 3.0], [9, 9, 5.0, 5.0, 5.0]]


def test_long_texts_are_cut(tmp_path):
    page = page_of(write_run(tmp_path / "run", 1, "x" * 9000))
    assert re.search(r"\bx{2000} … \(7,000 more characters\)", page.sections["samples"])
