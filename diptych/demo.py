"""`diptych demo`, which `make demo` runs: the split system started, asked about real pictures, and stopped again.

Answers are printed beside what was expected, right or wrong: the demo shows that the system works and how well its
small model sees. It fails only if a question gets no answer or a service does not stop.
"""

from __future__ import annotations

import asyncio
import json
import re
from dataclasses import dataclass
from pathlib import Path

import httpx
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from diptych import launch, machine, models
from diptych.client import Answer, Client, RequestFailed
from diptych.errors import CommandFailed
from diptych.report import milliseconds, timing_table
from shared import resources

MAX_TOKENS = 40
LOG_WIDTH = 120  # where there is no terminal whose width could be asked


@dataclass(frozen=True, slots=True)
class Question:
    """One question about one sample picture; `note` says what is special about how it is asked."""

    picture: Path
    text: str
    expected: str
    note: str = ""

    @property
    def label(self) -> str:
        return f"{self.picture.stem}, {self.note}" if self.note else self.picture.stem


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a question: an answer, or the server's reason for not giving one."""

    question: Question
    answer: Answer | None = None
    failure: str = ""

    @property
    def is_right(self) -> bool:
        return self.answer is not None and normal(self.answer.text) == normal(self.question.expected)


def run(port: int) -> int:
    """The whole demo; returns the exit code."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = LOG_WIDTH
    model = models.resolve("demo", say=console.print)
    questions = choose_questions(models.demo_samples(model.folder))
    plan = launch.Plan(model=model, port=port or machine.free_ports(1)[0])
    console.print(
        f"Starting the demo system on this machine ({resources.available_cores()} CPU cores): "
        "gateway, vision encoder, text engine and an embedding cache."
    )
    outcomes, all_stopped = asyncio.run(_play(plan, questions, console))
    _print_results(outcomes, console)
    console.print("Every service has stopped." if all_stopped else "A service did not stop.")
    console.print("Ask about your own pictures: [bold]make up[/bold], then open http://127.0.0.1:8000")
    num_failed = sum(outcome.answer is None for outcome in outcomes)
    return 0 if all_stopped and not num_failed else 1


def choose_questions(samples: Path) -> list[Question]:
    """The first question about each sample picture; the first one streamed, and asked again at the end."""
    try:
        entries = json.loads((samples / "samples.json").read_text())
    except (OSError, ValueError) as error:
        raise CommandFailed(f"the sample pictures cannot be read: {error}") from None
    chosen = [
        Question(samples / entry["file"], entry["questions"][0]["question"], entry["questions"][0]["answer"])
        for entry in entries
    ]
    first = chosen[0]
    streamed = Question(first.picture, first.text, first.expected, note="streamed")
    again = Question(first.picture, first.text, first.expected, note="again")
    return [streamed, *chosen[1:], again]


def normal(text: str) -> str:
    """Lower case without punctuation and articles: "A red circle." and "red circle" are the same answer."""
    words = re.sub(r"[^a-z0-9 ]", "", text.lower().replace("-", " ")).split()
    return " ".join(word for word in words if word not in ("a", "an", "the"))


async def _play(plan: launch.Plan, questions: list[Question], console: Console) -> tuple[list[Outcome], bool]:
    async with launch.running(plan, console, show_logs=False) as supervisor:
        console.print(f"Ready on {plan.base_url}: asking {len(questions)} questions through the OpenAI API.")
        with Client(plan.base_url) as client, console.status("") as status:
            outcomes = []
            for question in questions:
                status.update(f"{question.label}: {question.text}")
                outcomes.append(await asyncio.to_thread(_ask, client, plan.model.name, question))
        console.print("Stopping the services.")
    processes = [child.process for child in supervisor.children]
    return outcomes, all(process is not None and process.returncode is not None for process in processes)


def _ask(client: Client, model: str, question: Question) -> Outcome:
    options = {"model": model, "temperature": 0, "max_tokens": MAX_TOKENS}
    try:
        if question.note == "streamed":
            *_, last = client.stream(question.text, [question.picture], **options)
            assert isinstance(last, Answer)
            return Outcome(question, last)
        return Outcome(question, client.ask(question.text, [question.picture], **options))
    except (RequestFailed, httpx.HTTPError) as error:
        return Outcome(question, failure=str(error) or type(error).__name__)


def _print_results(outcomes: list[Outcome], console: Console) -> None:
    table = Table(title="What the model said", title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("picture", "question", "answer", "expected", ""):
        table.add_column(column)
    for outcome in outcomes:
        question, mark = outcome.question, "[green]✓[/green]" if outcome.is_right else "[red]✗[/red]"
        said = Text(outcome.answer.text.strip()) if outcome.answer else Text(f"no answer: {outcome.failure}", "red")
        table.add_row(question.label, question.text, said, question.expected, mark)
    console.print(table)
    console.print(timing_table([(each.question.label, each.answer) for each in outcomes if each.answer]))
    for each in outcomes:
        if each.answer and each.answer.first_token_s is not None:
            console.print(f"The streamed answer began after {milliseconds(each.answer.first_token_s)} ms.")
    num_right = sum(outcome.is_right for outcome in outcomes)
    console.print(f"{num_right} of {len(outcomes)} answers are as expected.")
