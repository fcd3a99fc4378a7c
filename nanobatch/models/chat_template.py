"""A conversation as one text, by the checkpoint's chat template.

A chat template is a program in the Jinja language that came with a checkpoint. It may loop for
hours or ask for 100 GB, and no check of its source can tell. So it is rendered in a process of
its own, which costs about 0.1 s and can be stopped:

    render()  --template, messages, limits as JSON-->  chat_sandbox.main()
              <-------the text, or what is wrong-----

Always holds: whatever a template does, render() returns or raises ValueError soon after
TIME_LIMIT. Where the system can limit a process's memory (Linux), the template gets no more
than MAX_BYTES.

Source: apply_chat_template of Hugging Face transformers.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

TIME_LIMIT = 10.0  # seconds, with the start of the process
MAX_BYTES = 2**29  # of the process's memory
MAX_ADDED_CHARS = 1_000_000  # that a template adds to what the messages hold
START = (  # with our modules' paths as arguments
    "import sys; sys.path[:] = sys.argv[1:]; "
    "from nanobatch.models.chat_sandbox import main; main()"
)


def render(
    template: str, messages: Sequence[dict], special_tokens: Mapping[str, str], where: str
) -> str:
    """The text of a conversation, up to where the assistant's answer begins.

    Args:
        template: in Jinja.
        messages: the conversation, of what JSON can hold; a field that is None is left out.
        special_tokens: what a template may ask for by name, such as bos_token.
        where: the template's checkpoint, for errors.

    Raises:
        ValueError: messages is not JSON; or the template cannot be rendered: it has a fault,
            refuses the conversation, or needs more than the limits above.
    """
    messages = [{k: v for k, v in m.items() if v is not None} for m in messages]
    try:
        content = json.dumps(messages, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"messages cannot be written as JSON: {error}") from None
    request = {
        "template": template,
        "variables": {"messages": messages, **special_tokens},
        "max_chars": MAX_ADDED_CHARS + len(content),
        "max_bytes": MAX_BYTES,
    }
    answer = _in_a_process(json.dumps(request).encode())
    if "error" in answer:
        raise ValueError(f"{where}: the chat template cannot be rendered: {answer['error']}")
    return answer["text"]


def _in_a_process(request: bytes) -> dict:
    """What chat_sandbox.answer returns there, or why there is no answer."""
    # Without the working directory (""), which may be the checkpoint's; -I is for isolated.
    path = [str(Path(__file__).parents[2]), *filter(None, sys.path)]
    try:
        done = subprocess.run(
            [sys.executable, "-I", "-c", START, *path],
            input=request,
            capture_output=True,
            timeout=TIME_LIMIT,
        )
    except subprocess.TimeoutExpired:
        return {"error": f"it takes longer than {TIME_LIMIT:g} s"}
    except OSError as error:
        return {"error": f"its process cannot be started: {error}"}
    if done.returncode != 0:
        last = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        return {"error": f"its process ended with status {done.returncode} {last}".rstrip()}
    return json.loads(done.stdout)
