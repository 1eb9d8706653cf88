"""Writes the tasks of GSM8K (arXiv 2110.14168): grade-school problems with a number as answer.

    python examples/gsm8k/prepare.py --out runs/gsm8k/task

Writes ``OUT/train.jsonl``, and ``OUT/heldout.jsonl`` with GSM8K's own test split.
"""

from __future__ import annotations

import argparse
import json
import urllib.request
from pathlib import Path

SOURCE = "https://raw.githubusercontent.com/openai/grade-school-math/master/grade_school_math/data"
SPLITS = {"train": "train.jsonl", "heldout": "test.jsonl"}
"""Files of `SOURCE` by our names for them."""
ASKED = "\nReason briefly, and end with #### and the number."


def task_of(line: str) -> dict[str, object]:
    """Return the task of a line of GSM8K, whose answer ends with ``#### 1,234``. Qwen3 then answers without its thinking."""
    problem = json.loads(line)
    answer = problem["answer"].rpartition("####")[2].strip().replace(",", "")
    prompt = problem["question"].strip() + ASKED
    return {"prompt": prompt, "answer": answer, "chat_template_kwargs": {"enable_thinking": False}}


def main() -> None:
    """Read the command line, and write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder to write into")
    parser.add_argument(
        "--source", default=SOURCE, help="address of the folder with GSM8K's files; file:// for a local one"
    )
    arguments = parser.parse_args()
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, file in SPLITS.items():
        with urllib.request.urlopen(f"{arguments.source}/{file}", timeout=60) as answer:  # noqa: S310 - what the user names
            tasks = [task_of(line) for line in answer.read().decode().splitlines()]
        path = arguments.out / f"{name}.jsonl"
        path.write_text("".join(json.dumps(task) + "\n" for task in tasks))
        print(f"{path}: {len(tasks)} tasks")


if __name__ == "__main__":
    main()
