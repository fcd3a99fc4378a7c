"""Renders one chat template in a process of its own; see models/chat_template.py.

    main()   stdin: {"template": ..., "variables": ...}   stdout: {"text": ...}

A template can do here what transformers lets it do: Jinja's sandbox, without files, other
templates, or attributes that Python gives a meaning.

Always holds: whatever the template raises is an answer, {"error": why}.

Source: chat_template_utils.py of Hugging Face transformers, whose text this equals.
"""

from __future__ import annotations

import contextlib
import datetime
import json
import sys
import traceback

from jinja2 import TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

MAX_REASON_CHARS = 500  # of what an exception says


def main() -> None:
    """Read a request (limit_memory's and answer's arguments), write its answer."""
    request = json.load(sys.stdin.buffer)
    limit_memory(request.pop("max_bytes"))
    sys.stdout.write(json.dumps(answer(**request)))


def limit_memory(max_bytes: int) -> None:
    """Bound this process's memory, on a system that can."""
    with contextlib.suppress(ImportError, ValueError, OSError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, max_bytes))


def answer(template: str, variables: dict, max_chars: int) -> dict:
    """{"text": the rendered template}, or {"error": why there is none}."""
    try:
        pieces, num_chars = [], 0
        compiled = make_environment().from_string(template)
        fixed = {"tools": None, "documents": None, "add_generation_prompt": True}
        for piece in compiled.generate(fixed | variables):
            pieces.append(piece)
            num_chars += len(piece)
            if num_chars > max_chars:
                return {"error": f"its text is longer than {max_chars:,} characters"}
        text = "".join(pieces)
        text.encode()  # UnicodeEncodeError for a lone surrogate
        return {"text": text} if text else {"error": "its text is empty"}
    except MemoryError:
        return {"error": "it takes too much memory"}
    except Exception as error:  # whatever the template's expressions raise
        return {"error": _reason(error)}


def _reason(error: Exception) -> str:
    """What was raised, and in which line of the template."""
    frames = traceback.extract_tb(error.__traceback__)
    lines = [frame.lineno for frame in frames if frame.filename == "<template>"]
    lineno = getattr(error, "lineno", lines[-1] if lines else None)
    text = f"{type(error).__name__}: {str(error)[:MAX_REASON_CHARS]}"
    return text if lineno is None else f"line {lineno}: {text}"


def make_environment() -> ImmutableSandboxedEnvironment:
    """Jinja's sandbox with what transformers adds to it."""
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda format: datetime.datetime.now().strftime(format),
        "dict": PlainDict(),
        "namespace": PlainNamespace,
    }
    return environment


class Generation(Extension):
    """{% generation %} marks the assistant's part for training; here it means nothing."""

    tags = {"generation"}

    def parse(self, parser):
        lineno = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=lineno)


class PlainDict:
    """What templates use of Python's dict."""

    fromkeys = staticmethod(dict.fromkeys)

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)


class PlainNamespace(Namespace):
    """Without names that Python gives a meaning, which could lead out of the sandbox."""

    def __init__(*args, **kwargs):  # as Namespace: a field may be called self
        Namespace.__init__(args[0])
        for name, value in dict(*args[1:], **kwargs).items():
            args[0][name] = value

    def __setitem__(self, name, value):
        if str(name).startswith("_"):
            raise SecurityError(f"a namespace has no field {name!r}")
        super().__setitem__(name, value)


def raise_exception(message):
    """With this a template refuses a conversation."""
    raise TemplateError(message)


def to_json(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False) -> str:
    """Jinja's own escapes HTML."""
    options = {"indent": indent, "separators": separators, "sort_keys": sort_keys}
    return json.dumps(x, ensure_ascii=ensure_ascii, **options)
