"""Prompts of ``qerl generate`` from options, a file or standard input: text lines, or JSON objects with chats."""

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


class PromptsFileError(ValueError):
    """A row of a prompts file that is no prompt."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt: a text, or the messages of a chat; ``columns`` are the other fields of its row."""

    content: str | list[dict[str, str]]
    columns: dict[str, Any] = field(default_factory=dict)

    def messages(self, system: str | None) -> list[dict[str, str]]:
        """The chat to render, after the message ``system``."""
        own = [{"role": "user", "content": self.content}] if isinstance(self.content, str) else self.content
        return own if system is None else [{"role": "system", "content": system}, *own]


def read_prompts(source: str) -> list[Prompt]:
    """Prompts of a file, or of standard input for ``-``; empty lines are skipped.

    A file ``*.jsonl``, and any input whose first line is a JSON object, holds one object a line with ``prompt`` (a
    text, or a list of messages) or ``messages``. Otherwise every line is a prompt.

    Raises:
        PromptsFileError: no prompt at all, or a row that is none, with its line number.
    """
    where = "standard input" if source == "-" else source
    if source == "-":
        if sys.stdin.isatty():
            raise PromptsFileError("--prompts - reads standard input, which is a terminal: pipe the prompts in")
        text = sys.stdin.read()
    else:
        text = Path(source).read_text(encoding="utf-8")
    # Only line feeds end a line: JSON strings may hold other separators.
    lines = [(number, line.rstrip("\r")) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise PromptsFileError(f"{where} holds no prompts: one a line, or JSON objects with 'prompt' or 'messages'")
    if source.endswith(".jsonl") or _is_object(lines[0][1]):
        return [_row(line, f"{where}, line {number}") for number, line in lines]
    return [Prompt(line) for _, line in lines]


def _is_object(line: str) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except ValueError:
        return False


def _row(line: str, where: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        # The error's own text counts lines within this line.
        raise PromptsFileError(f"{where} is no JSON: {error.msg}, column {error.colno}") from error
    except ValueError as error:
        raise PromptsFileError(f"{where} is no JSON: {error}") from error
    if not isinstance(row, dict):
        raise PromptsFileError(f"{where} is a JSON {type(row).__name__}, not an object with 'prompt' or 'messages'")
    given = [name for name in ("prompt", "messages") if name in row]
    if len(given) != 1:
        raise PromptsFileError(f"{where} must have either 'prompt' or 'messages'; it has {', '.join(row) or 'nothing'}")
    content = row[given[0]]
    if given == ["messages"] or not isinstance(content, str):
        _check_messages(content, given[0], where)
    if not content:
        raise PromptsFileError(f"{where}: {given[0]} is empty")
    return Prompt(content, {name: value for name, value in row.items() if name not in given})


def _check_messages(content: Any, name: str, where: str) -> None:
    messages = content if isinstance(content, list) else [content]
    for message in messages:
        fine = isinstance(message, dict) and all(isinstance(message.get(key), str) for key in ("role", "content"))
        if not fine or not isinstance(content, list):
            raise PromptsFileError(
                f"{where}: {name} must be {'a text or ' if name == 'prompt' else ''}a list of messages with texts "
                f"'role' and 'content', got {json.dumps(message, ensure_ascii=False)[:80]}"
            )
