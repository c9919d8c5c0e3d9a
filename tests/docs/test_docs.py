"""What the documentation says is so: commands run, configs load, plugins train, files and messages exist."""

import asyncio
import json
import re
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml

from launcher.checks import files
from launcher.checks.run import check_run
from launcher.commands import RESUMABLE
from runtime import plugins
from runtime.comm import commands, messages
from runtime.errors import EXIT_CODES
from runtime.load import load_run, load_site, read_run
from runtime.types import Prompt
from tests.docs.blocks import DOCUMENTS, ROOT, Block, Shell, blocks, make_targets

QUICKSTART = "python -m launcher submit configs/quickstart.yaml"
OWN_RUN = "python -m launcher submit my_run.yaml"
SGLANG = "/project/sglang-env"
"""Where the README's reader has SGLang."""


@pytest.fixture(scope="module")
def shell(quickstart: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shell]:
    """In a folder with the project's configs and models, and every file that the documentation has readers write."""
    folder = tmp_path_factory.mktemp("reader")
    (folder / "configs").symlink_to(ROOT / "configs")
    (folder / "models").symlink_to(quickstart.parent)
    for block in blocks():
        if block.file and not (ROOT / block.file).exists():
            path = folder / block.file
            assert not path.exists(), f"{block}: {block.file} is shown twice"
            path.parent.mkdir(exist_ok=True)
            path.write_text(block.text.replace(SGLANG, str(ROOT / ".venv-sglang")))
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        yield Shell(folder)


def text_of(document: str) -> str:
    return (ROOT / document).read_text()


# ---- commands


@pytest.mark.parametrize("block", blocks("sh"), ids=str)
def test_commands_run(block: Block, shell: Shell) -> None:
    for command in block.text.splitlines():
        if command.startswith("make "):
            assert command.split()[1] in make_targets()
            continue
        assert "detach" not in command, "a run in the background would go on beside the other tests"
        if not command.startswith(QUICKSTART):
            shell.run(QUICKSTART)
        result = shell.run(command)
        assert result.returncode == 0, f"{command}\n{result.stdout}{result.stderr}"
        assert result.stdout


@pytest.mark.parametrize("block", blocks("console"), ids=str)
def test_mistakes_are_answered_as_shown(block: Block, shell: Shell) -> None:
    command, _, answer = block.text.removeprefix("$ ").partition("\n")
    result = shell.run(command)
    assert result.returncode == EXIT_CODES["config"]
    assert result.stdout + result.stderr == answer


def test_the_output_shown_is_that_of_a_run(shell: Shell) -> None:
    """As far as numbers, times and lines that are left out allow."""
    shown = next(b.text for b in blocks("text") if b.document == "README.md")
    real = shell.run(QUICKSTART).stdout

    def shapes(text: str) -> list[str]:
        text = re.sub(r"\S*/runs/", "runs/", text)
        text = re.sub(r"quickstart-\d{6}-\d{6}-[0-9a-f]{4}", "RUN", text)
        lines = [re.sub(r"\d+m\d+s|\d+(\.\d+)?s?", "0", line) for line in text.splitlines()]
        return [" ".join(line.split()) for line in lines]

    assert [line for line in shapes(shown) if line not in shapes(real)] == []


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert {block.language for block in blocks()} <= {"sh", "console", "text", "jsonl", "yaml", "python"}
    assert {OWN_RUN, QUICKSTART} <= {line for block in blocks("sh") for line in block.text.splitlines()}


# ---- configs


@pytest.mark.parametrize("block", blocks("yaml"), ids=str)
def test_configs_are_accepted(block: Block, shell: Shell) -> None:
    keys = yaml.safe_load(block.text)
    path = shell.folder / (block.file or f"{block.document.replace('/', '-')}-{block.line}.yaml")
    if {"scheduler", "slurm"} & {*keys}:
        site = load_site(str(path))
        assert site.name == keys["name"] and (site.gpus_per_node or site.cpu_slots_per_node > 1)
        return
    if not block.file:
        path.write_text(("" if "name" in keys else "extends: configs/quickstart.yaml\n") + block.text)
    loaded = read_run(path)
    site = load_site(loaded.config.site)
    expected = ("different prompts", *(("is built for CPUs only", "runs_dir is in /tmp") if site.gpus_per_node else ()))
    warnings = check_run(loaded, site)
    assert all(any(words in warning for words in expected) for warning in warnings), warnings


def test_every_key_of_a_run_is_shown_with_its_default(shell: Shell) -> None:
    shown = yaml.safe_load(Path("everything.yaml").read_text())
    config = load_run("everything.yaml")

    def keys(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: keys(v) for k, v in value.items()}
        return [keys(v) for v in value] if isinstance(value, (list, tuple)) else None

    assert keys(shown) == keys(msgspec.to_builtins(config))
    required = {key: shown[key] for key in ("name", "num_steps", "models")}
    required["data"] = [{"path": shown["data"][0]["path"]}]
    required["rollout"] = {key: shown["rollout"][key] for key in ("num_prompts", "num_samples")}
    Path("required.yaml").write_text(yaml.safe_dump(required))
    assert load_run("required.yaml") == config


@pytest.mark.parametrize("block", blocks("jsonl"), ids=str)
def test_data_is_accepted(block: Block, shell: Shell) -> None:
    assert len(files.check_data(str(shell.folder / block.file), "here")) == len(block.text.splitlines())


# ---- plugins


def test_every_plugin_shown_is_one_of_those_tested_below() -> None:
    tested = {f"my_project/{name}.py" for name in ("rewards", "second_try", "rloo", "judge")}
    assert {block.file for block in blocks("python")} == tested


def test_reward_environment_and_algorithm_train_together(shell: Shell) -> None:
    result = shell.run(OWN_RUN)
    assert result.returncode == 0, result.stdout + result.stderr
    run = shell.newest("my-run")
    (line,) = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    assert line["failed"] == 0 and line["grad_norm"] > 0
    assert line["logprob"] < 0, "a metric that only this algorithm has"
    samples = [json.loads(x) for x in (run / "samples/step-000001.jsonl").read_text().splitlines()]
    assert {s["reward"] for s in samples} <= {0.0, 0.1, 1.0} and any(s["reward"] for s in samples)
    assert any(s["text"].count(";") > 1 for s in samples), "nobody made a second try"


def test_the_judge_asks_its_service(shell: Shell) -> None:
    asked = []

    class Service(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append(question)
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.end_headers()
            self.wfile.write(json.dumps({"score": len(question["answer"])}).encode())

        def log_message(self, *_: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        module = plugins.find("reward", "my_project.judge", "test")
        judge = module.build(plugins.options(module, {"url": f"http://127.0.0.1:{server.server_port}"}, "test"))
        prompt = Prompt(id="p", messages=({"role": "user", "content": "2+2"},), answer="4", dataset="d")
        scores = asyncio.run(judge.score([], ["4", "five"], prompt, None))
        server.shutdown()
    assert scores == [1.0, 4.0]
    assert {"question": "2+2", "answer": "five", "expected": "4"} in asked


# ---- what the text names


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_and_files_exist(document: str) -> None:
    text = text_of(document)
    for link in re.findall(r"\]\((?!https?:)([^)#]+)", text):
        assert (ROOT / document).parent.joinpath(link).exists(), link
    for path in re.findall(r"`((?:runtime|launcher|configs|tests|docs)/[\w./-]+)`", text):
        assert (ROOT / path).exists(), path


def test_the_readme_leads_to_every_page() -> None:
    links = set(re.findall(r"\((docs/\w+\.md)\)", text_of("README.md")))
    assert links == set(DOCUMENTS) - {"README.md"}


def test_the_run_folder_is_as_described(shell: Shell) -> None:
    shell.run(QUICKSTART)
    run = shell.newest("quickstart")
    table = text_of("README.md").split("## What a run leaves")[1].split("\n## ")[0]
    rows = [row.split("|")[1:3] for row in table.splitlines() if row.startswith("| `")]
    for first, second in rows:
        for name in re.findall(r"`([^`]+)`", first):
            pattern = re.sub(r"<\w>", "*", name.rstrip("/"))
            assert list(run.glob(pattern)), name
        if "attempts" in first:
            for name in re.findall(r"`([^`]+)`", second):
                assert list((run / "attempts/0").glob(re.sub(r"<\w>", "*", name))), name
    named = {name.split("/")[0] for first, _ in rows for name in re.findall(r"`([^`]+)`", first)}
    assert {path.name for path in run.iterdir()} <= named


def test_every_metric_is_explained(shell: Shell) -> None:
    """Those of two runs, of which one evaluates and the other has an algorithm of its own, and what code alone tells
    of other algorithms; and no metric is that nothing writes."""
    rows = re.findall(r"^\| (`.+?) \|", text_of("docs/metrics.md"), re.MULTILINE)
    explained = [name for row in rows for name in re.findall(r"`([^`]+)`", row)]
    assert len({*explained}) == len(explained), "a metric is explained twice"
    written = set()
    for command, name in ((QUICKSTART, "quickstart"), (OWN_RUN, "my-run")):
        shell.run(command)
        lines = (shell.newest(name) / "metrics.jsonl").read_text().splitlines()
        written |= {key for line in lines for key in json.loads(line)}
    written = {re.sub(r"^eval/\w+/", "eval/<name>/", key) for key in written - {"logprob"}}  # my_project.rloo's
    assert {"eval/<name>/accuracy", "reward", "push_s"} <= written
    code = "".join(path.read_text() for path in sorted((ROOT / "runtime").rglob("*.py")))
    only_some = set(re.findall(r'(?:sums|metrics)\["(\w+)"\] =', code))
    assert {"kl", "entropy", "explained_variance"} <= only_some
    assert written | only_some <= {*explained}
    for name in explained:
        own = re.sub(r"^(critic_|eval/<name>/)|<\w>$|^\w+(?=_divergence)", "", name)
        assert re.search(rf'["}}]{own}["{{]', code), f"{name}: no code says {own!r}"


def test_every_exit_report_is_explained_with_its_code() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \|", text_of("docs/troubleshooting.md"), re.MULTILINE)
    assert {kind: int(code) for kind, code in rows} == EXIT_CODES


def test_messages_in_the_table_are_those_of_the_code() -> None:
    code = "".join(path.read_text() for top in ("launcher", "runtime") for path in sorted((ROOT / top).rglob("*.py")))
    code = re.sub(r'"\n\s+f?"', "", code)  # a text over several lines
    table = text_of("docs/troubleshooting.md").split("## While it runs")[1]
    quoted = [m for row in re.findall(r"^\| (`.+?) \|", table, re.MULTILINE) for m in re.findall(r"`([^`]+)`", row)]
    assert len(quoted) > 8
    for message in quoted:
        for part in message.split("…"):
            assert part.strip() in code, f"{message}: no code says {part!r}"


def test_what_a_resume_may_change_is_told() -> None:
    text = text_of("docs/recipes.md").split("## Resume")[1]
    assert all(f"`{section}`" in text for section in RESUMABLE)


def test_every_message_is_in_the_architecture() -> None:
    table = text_of("docs/architecture.md").split("## Who talks to whom")[1].split("\n## ")[0]
    kinds = {
        name
        for module in (commands, messages)
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__ and issubclass(value, msgspec.Struct)
    }
    kinds = {name for name in kinds if not name.startswith("_")}
    assert set(re.findall(r"`([A-Z]\w+)`", table)) == kinds
