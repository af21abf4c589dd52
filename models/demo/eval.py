"""Held-out evaluation of the demo model: exact match, greedy, each row from seeds, strings and styles never trained on.

    python models/demo/eval.py --assets ASSETS --out result.json [--n 200] [--backend transformers | http --url URL]

ASSETS is the folder that `train.py --only assets` makes.  Splits: 'eval' = trained pictogram styles and fonts, unseen seeds,
numbers and words; 'unseen' = OpenMoji and Lato, never trained on.  Blind: the same questions about a plain grey picture.
"""
import argparse
import json
import random
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from PIL import Image

sys.path.insert(0, str(Path(__file__).resolve().parent))

from recipe import phrases, small_talk
from recipe.backends import Backend, HttpBackend, Item, TransformersBackend
from recipe.conversations import two_picture_questions
from recipe.drawing import SIZE, Assets
from recipe.questions import questions
from recipe.scenes import Scene, render

GREY = Image.new("RGB", (SIZE, SIZE), (127, 127, 127))
TURNS = 3  # of a conversation; the first, which is asked like any other question, is not scored
LONG_ANSWERS = ("describe", "what_all", "no picture", "two_what", "other wordings", "turns")


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the table: where its pictures and questions come from, and the goal in percent."""

    title: str
    split: str
    kind: str | None
    asks: str
    goal: float | None = None
    n_factor: int = 1
    keep: Callable[[Scene], bool] = lambda _scene: True


def is_long_number(scene: Scene) -> bool:
    return scene.things[0].type == "number" and len(scene.things[0].name) > 2


def is_word(scene: Scene) -> bool:
    return scene.things[0].type == "word"


ROWS = (
    Row("shapes: color of a shape", "eval", "shapes", "colour", 97),
    Row("shapes: shape of a color", "eval", "shapes", "shape", 95),
    Row("shapes: how many objects (1-5)", "eval", "shapes", "count", 95),
    Row("shapes: how many of a kind", "eval", "shapes", "count_some"),
    Row("shapes: background color", "eval", "shapes", "background", 97),
    Row("shapes: what is left/right/above/below", "eval", "shapes", "relation", 90),
    Row("shapes: where (9 places)", "eval", "shapes", "where", 85),
    Row("shapes: biggest / smallest", "eval", "shapes", "size"),
    Row("shapes: yes/no, is it there (balanced)", "eval", "shapes", "yesno_shape", 92),
    Row("shapes: yes/no, relation (balanced)", "eval", "shapes", "yesno_relation"),
    Row("pictograms, trained styles: name", "eval", "pictogram", "what", 85, 2),
    Row("pictograms, trained styles: name, wordings never trained", "eval", "pictogram", "new wording"),
    Row("pictograms, trained styles: category", "eval", "pictogram", "category", 90),
    Row("pictograms, trained styles: yes/no (balanced)", "eval", "pictogram", "yesno_pictogram", 92),
    Row("pictograms, trained styles: several, all named", "eval", "several", "what_all", 60),
    Row("pictograms, trained styles: how many", "eval", "several", "count"),
    Row("pictograms, trained styles: relation", "eval", "several", "relation"),
    Row("pictograms, UNSEEN style: name", "unseen", "pictogram", "what", 45, 2),
    Row("pictograms, UNSEEN style: category", "unseen", "pictogram", "category", 65),
    Row("pictograms, UNSEEN style: yes/no (balanced)", "unseen", "pictogram", "yesno_pictogram"),
    Row("reading: unseen numbers", "eval", "text", "read", 85, keep=is_long_number),
    Row("reading: unseen words", "eval", "text", "read", 75, keep=is_word),
    Row("reading: unseen numbers, UNSEEN font", "unseen", "text", "read", keep=is_long_number),
    Row("reading: unseen words, UNSEEN font", "unseen", "text", "read", keep=is_word),
    Row("reading: color of the text", "eval", "text", "text_colour"),
    Row("unanswerable -> I can't see that", "eval", None, "cant", 90),
    Row("shapes: describe", "eval", "shapes", "describe"),
    Row("two pictures: which one has it", "eval", None, "two_which"),
    Row("two pictures: what is in the first / second", "eval", "pictogram", "two_what"),
    Row("no picture: small talk, identity, no picture sent", "eval", None, "no picture"),
    Row("six other kinds of question, wordings never trained", "eval", None, "other wordings"),
    Row("several turns about one picture: second and third answer", "eval", None, "turns"),
)


def normal(text: str) -> str:
    """Lower case, without punctuation and articles."""
    text = re.sub(r"[^a-z0-9 ]", "", text.lower().replace("-", " "))
    return " ".join(w for w in text.split() if w not in ("a", "an", "the"))


def ask_about(row: Row, assets: Assets, seed: int, rng: random.Random) -> tuple[list[Image.Image], list[tuple[str, str]]]:
    """The pictures of a seed and the row's candidate (question, answer) pairs about them."""
    picture, scene = render(assets, seed, row.split, row.kind)
    if row.asks == "no picture":
        asked, answer = rng.choice(small_talk.SMALL_TALK)
        pairs = [(phrases.pick(rng, asked), answer)] if rng.random() < 0.8 else [(questions(scene, rng)[0].text, small_talk.NO_PICTURE)]
        return [], pairs
    if row.asks.startswith("two"):
        other, other_scene = render(assets, seed + 50_000, row.split, row.kind)
        asked = two_picture_questions((scene, other_scene), rng)
        return [picture, other], [(q.text, q.answer) for q in asked if q.kind == row.asks]
    if not row.keep(scene):
        return [], []
    asked = [q for q in questions(scene, rng) if row.asks == "turns" or q.kind in asked_kinds(row)]
    if "wording" in row.asks:
        return [picture], [(rng.choice(phrases.HELD_OUT[q.kind]), q.answer) for q in asked]
    return [picture], [(q.text, q.answer) for q in asked]


def asked_kinds(row: Row) -> tuple[str, ...]:
    """The kinds of question that a row asks about one picture."""
    other = tuple(kind for kind in phrases.HELD_OUT if kind != "what")
    return {"new wording": ("what",), "other wordings": other}.get(row.asks, (row.asks,))


def make_items(row: Row, assets: Assets, n: int, per_picture: int = 1) -> list[list[Item]]:
    """n lists of questions, each list about another picture; the row's number sets its seeds."""
    rows: list[list[Item]] = []
    seed = 10**8 + 10**5 * ROWS.index(row)
    while len(rows) < n:
        seed += 1
        rng = random.Random(seed)
        pictures, pairs = ask_about(row, assets, seed, rng)
        if len(pairs) >= per_picture:
            rows.append([Item(pictures, phrases.restyle(question, rng), re.sub("[\x01\x02]", "", answer))
                         for question, answer in rng.sample(pairs, per_picture)])
    return rows


def ask(row: Row, backend: Backend, assets: Assets, n: int, max_tokens: int) -> tuple[list[Item], list[str]]:
    """n questions of a row and the model's answers."""
    if row.asks != "turns":
        items = [item for [item] in make_items(row, assets, n)]
        return items, backend.answer(items, max_tokens)
    all_items, all_answers = [], []
    turns = list(zip(*make_items(row, assets, n // (TURNS - 1), TURNS)))
    earlier: list[tuple[tuple[str, str], ...]] = [()] * len(turns[0])
    for turn in turns:
        items = [replace(item, earlier=past) for item, past in zip(turn, earlier)]
        answers = backend.answer(items, max_tokens)
        earlier = [(*item.earlier, (item.question, answer)) for item, answer in zip(items, answers)]
        all_items += items
        all_answers += answers
    first = len(turns[0])
    return all_items[first:], all_answers[first:]


def score(row: Row, items: list[Item], answers: list[str]) -> float:
    """Exact match; balanced accuracy where the title says so."""
    right = [normal(a) == normal(i.expected) for i, a in zip(items, answers, strict=True)]
    if "balanced" not in row.title:
        return sum(right) / len(right)
    sides = [[r for r, i in zip(right, items) if i.expected == side] for side in ("yes", "no")]
    return sum(sum(s) / max(1, len(s)) for s in sides) / 2


def evaluate(row: Row, backend: Backend, assets: Assets, n: int, blind_n: int) -> dict:
    """One line of the table."""
    max_tokens = 48 if row.asks in LONG_ANSWERS else 16
    items, answers = ask(row, backend, assets, n * row.n_factor, max_tokens)
    refused = sum("cant see" in normal(a) for a in answers) / len(answers)
    wrong = [(i.question, i.expected, a) for i, a in zip(items, answers) if normal(a) != normal(i.expected)]
    result = {"row": row.title, "n": len(items), "score": score(row, items, answers), "goal": row.goal, "refused": refused, "wrong": wrong[:15]}
    if blind_n and items[0].pictures:
        blind = [replace(i, pictures=[GREY] * len(i.pictures)) for i in items[:blind_n]]
        result |= {"blind": score(row, blind, backend.answer(blind, max_tokens)), "blind_n": len(blind)}
    return result


def table(results: list[dict]) -> str:
    """The results as Markdown."""
    lines = ["| held-out test | n | exact match | goal | blind (grey picture) |", "|---|---:|---:|---:|---:|"]
    for r in results:
        goal = "" if r["goal"] is None else f"{r['goal']} %" + ("" if 100 * r["score"] >= r["goal"] else " (missed)")
        blind = f"{100 * r['blind']:.1f} % (n {r['blind_n']})" if "blind" in r else ""
        lines.append(f"| {r['row']} | {r['n']} | {100 * r['score']:.1f} % | {goal} | {blind} |")
    return "\n".join(lines)


def false_refusals(results: list[dict]) -> float:
    """Share of answerable questions about pictures that were refused."""
    rows = [r for r in results if "unanswerable" not in r["row"] and "no picture" not in r["row"]]
    return sum(r["refused"] * r["n"] for r in rows) / max(1, sum(r["n"] for r in rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("eval.json"))
    parser.add_argument("--checkpoint", default=str(Path(__file__).resolve().parent / "checkpoint"))
    parser.add_argument("--backend", choices=("transformers", "http"), default="transformers")
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--n", type=int, default=200)
    parser.add_argument("--blind-n", type=int, default=100, help="questions asked again about a grey picture; 0 for none")
    parser.add_argument("--only", default="", help="only rows whose title contains this")
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    backend = HttpBackend(args.url) if args.backend == "http" else TransformersBackend(args.checkpoint, threads=args.threads)
    assets, results, began = Assets(args.assets), [], time.time()
    for row in ROWS:
        if args.only in row.title:
            results.append(evaluate(row, backend, assets, args.n, args.blind_n))
            print(f"{row.title:60s} {100 * results[-1]['score']:5.1f} %  {time.time() - began:.0f} s", file=sys.stderr, flush=True)
    report = {"backend": args.backend, "seconds": round(time.time() - began), "false_refusals": false_refusals(results), "rows": results}
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(table(results))
    print(f"\nFalse refusals over all answerable rows: {100 * report['false_refusals']:.2f} %")


if __name__ == "__main__":
    main()
