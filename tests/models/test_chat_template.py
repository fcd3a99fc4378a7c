"""Chat templates: the text they render, and those that cannot be rendered.

The oracle for the text is transformers' apply_chat_template, on templates in the forms of well
known models. Bad templates are programs that fail, refuse, leave the sandbox, or ask for time,
memory or text without end: each is a ValueError that names its checkpoint and says why.

A template is rendered in a process of its own. What needs no limit is tested without that
process, which would cost 0.1 s for each.
"""

import sys
import time

import pytest
from test_tokenizer import byte_level

from nanobatch import LLM
from nanobatch.models import chat_sandbox, chat_template
from nanobatch.models.tokenizer import HFTokenizer

TOKENS = {"bos_token": "<s>", "eos_token": "</s>"}

# ---- good templates ----------------------------------------------------------------------

TEMPLATES = {
    "ChatML": """{% for message in messages %}
{% if loop.first and message['role'] != 'system' %}
{{ '<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n' }}{% endif %}
{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}
{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
    "Llama 2": """{% if messages[0]['role'] == 'system' %}
    {% set loop_messages = messages[1:] %}
    {% set system = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}
{% else %}
    {% set loop_messages = messages %}
    {% set system = '' %}
{% endif %}
{% for message in loop_messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('Roles must alternate') }}
    {% endif %}
    {% set content = system + message['content'] if loop.index0 == 0 else message['content'] %}
    {% if message['role'] == 'user' %}
        {{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}
    {% elif message['role'] == 'assistant' %}
        {{ ' ' + content.strip() + ' ' + eos_token }}
    {% endif %}
{% endfor %}""",
    "Llama 3": """{{- bos_token }}
{%- if not date_string is defined %}
    {%- set date_string = strftime_now("%Y") if strftime_now is defined else "2024" %}
{%- endif %}
{%- if tools is not none %}{{- raise_exception("tools") }}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\n\nYear: " + date_string + "<|eot_id|>" }}
{%- for message in messages %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\n\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\n\n' }}
{%- endif %}""",
    "Gemma": """{{ bos_token }}{% for message in messages %}
{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}
{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + '<end_of_turn>\n' }}
{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}""",
    "Qwen 3": """{%- set ns = namespace(last=0, found=false) %}
{%- for message in messages[::-1] %}
    {%- set index = (messages|length - 1) - loop.index0 %}
    {%- if not ns.found and message.role == "user" and message.content is string %}
        {%- set ns.found = true %}{%- set ns.last = index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == "assistant" and '</think>' in message.content %}
        {%- set content = message.content.split('</think>')[-1].lstrip('\n') %}
    {%- else %}{%- set content = message.content %}{%- endif %}
    {{- '<|im_start|>' ~ message.role ~ ('*' if loop.index0 == ns.last else '') }}
    {{- '\n' ~ content ~ '<|im_end|>\n' }}
{%- endfor %}
{%- if enable_thinking is defined and not enable_thinking %}<think></think>{%- endif %}
<|im_start|>assistant
""",
    "training marks, macros, JSON": """{% macro turn(m) %}
[{{ m.role }}] {{ caller() }}{% endmacro %}
{% for m in messages %}
{% if loop.index > 3 %}{% break %}{% endif %}
{% call turn(m) %}
{% generation %}{% set c = m.content %}{{ c | tojson }}{% endgeneration %}{% endcall %}

{{ dict(a=1, b=['é', none]) | tojson(indent=2) }} {{ dict.fromkeys(['x'], 0) }}
{{ c is undefined }}
{{ m | items | list }} {{ '%s-%d' | format(m.role, 3) }} {{ '{:>9}'.format(m.role) }}
{% endfor %}""",
}  # fmt: skip
CONVERSATIONS = [
    [("user", "Hello")],
    [("system", "Be brief."), ("user", "  1 < 2 & \"q\" 'z'?\n "), ("assistant", "Yes."),
     ("user", "<b>é 漢 🦊</b>")],
    [("user", "a"), ("assistant", "<think>\nhm</think>\n\nb"), ("user", "c\n\nd")],
]  # fmt: skip


def as_messages(turns):
    return [{"role": role, "content": content} for role, content in turns]


def with_template(template):
    """A tokenizer with this chat template."""
    from transformers import PreTrainedTokenizerFast

    backend = byte_level().hf.backend_tokenizer
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, chat_template=template, name_or_path="some/model", **TOKENS
    )


@pytest.mark.parametrize("name", TEMPLATES)
def test_the_text_is_that_of_transformers(name):
    hf = with_template(TEMPLATES[name])
    for turns in CONVERSATIONS:
        messages = as_messages(turns)
        wanted = hf.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        variables = {"messages": messages, **hf.special_tokens_map}
        answer = chat_sandbox.answer(TEMPLATES[name], variables, max_chars=10_000)
        assert answer == {"text": wanted}


def test_token_ids_are_those_of_transformers():
    """Through the other process; a field that is None is not there."""
    hf = with_template(TEMPLATES["Llama 2"] + "{{ messages[0].name is defined }}")
    messages = as_messages(CONVERSATIONS[1])
    wanted = hf.apply_chat_template(messages, return_dict=False, add_generation_prompt=True)
    messages[0]["name"] = None
    assert HFTokenizer(hf).apply_chat_template(messages) == wanted
    assert wanted.count(hf.bos_token_id) == 2  # the template's own; none is added to them


def test_of_several_templates_the_default_is_used():
    hf = with_template({"default": "d", "tool_use": "t"})
    ids = HFTokenizer(hf).apply_chat_template(as_messages([("user", "x")]))
    assert hf.decode(ids) == "d"
    for none in (None, {"tool_use": "t"}):
        with pytest.raises(ValueError, match="no chat template"):
            HFTokenizer(with_template(none)).apply_chat_template([])


# ---- bad templates -----------------------------------------------------------------------

NESTED = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
DOUBLED = """{% set x = namespace(y='y') %}
{% for i in range(60) %}{% set x.y = x.y ~ x.y %}{% endfor %}"""
FAULTS = {  # template: what the message says
    "": "empty",
    "{% for m in [] %}x{% endfor %}": "empty",
    "ok\n{{ 1 / 0 }}": "line 2: ZeroDivisionError",
    "{% macro f() %}{{ f() }}{% endmacro %}\n{{ f() }}": "RecursionError",
    "{% include 'config.json' %}": "no loader",
    "{% extends 'config.json' %}": "no loader",
    "{% import 'config.json' as c %}": "no loader",
    "{{ raise_exception('System role not supported') }}": "System role not supported",
    "ok\n\n{{": "line 3: TemplateSyntaxError",
    "{% nothing %}": "unknown tag 'nothing'",
    "{{ messages | nothing }}": "No filter named 'nothing'",
    "{{ nothing() }}": "'nothing' is undefined",
    "{{ messages[0].tool.name }}": "has no attribute 'tool'",
    "{{ messages[7].role }}": "no element 7",
    "{{ messages[0].content + 1 }}": "TypeError",
    "{{ messages.append(1) }}": "SecurityError",
    "{{ messages.__class__.__mro__ }}": "SecurityError",
    "{{ '{0.__class__.__mro__}'.format(1) }}": "SecurityError",
    "{{ namespace(__class__=1) }}": "SecurityError",
    "{{ range(10**11) | list }}": "Range too big",
    "{{ '\\ud800' }}": "surrogates",
    "{{ raise_exception('x' * 10**6) }}": "x" * 100,
    "{% for i in range(9999) %}hello{% endfor %}": "longer than 10,000 characters",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}": "RecursionError",
    "{% if 1 %}" * 1500 + "{% endif %}" * 1500: "RecursionError",
    "{% for i in [1] %}" * 40 + "{% endfor %}" * 40: "SyntaxError",
}


@pytest.mark.parametrize("template", FAULTS, ids=[repr(t[:40]) for t in FAULTS])
def test_a_fault_is_told(template):
    messages = as_messages(CONVERSATIONS[0])
    answer = chat_sandbox.answer(template, {"messages": messages}, max_chars=10_000)
    assert FAULTS[template] in answer["error"]
    assert len(answer["error"]) < 1000


needs_a_limit = pytest.mark.skipif(
    sys.platform != "linux", reason="other systems do not limit a process's memory"
)
HUNGRY = {
    "'x' * 10**11": "{{ 'x' * 10**11 }}",
    "a filter": "{{ 'x' | center(10**11) }}",
    "doubled": DOUBLED,
}


@needs_a_limit
@pytest.mark.parametrize("name", HUNGRY)
def test_memory_has_a_limit(name, monkeypatch):
    monkeypatch.setattr(chat_template, "MAX_BYTES", 2**27)
    with pytest.raises(ValueError, match="some/model: the chat template .*memory"):
        HFTokenizer(with_template(HUNGRY[name])).apply_chat_template([])


@pytest.mark.parametrize("template", [NESTED, "{{ lipsum(n=10**9) }}"], ids=["loops", "lipsum"])
def test_time_has_a_limit(template, monkeypatch):
    monkeypatch.setattr(chat_template, "TIME_LIMIT", 0.5)
    start = time.monotonic()
    with pytest.raises(ValueError, match="some/model: the chat template .* longer than 0.5 s"):
        HFTokenizer(with_template(template)).apply_chat_template([])
    assert time.monotonic() - start < 5


def test_text_has_a_limit(monkeypatch):
    """What the messages hold does not count."""
    monkeypatch.setattr(chat_template, "MAX_ADDED_CHARS", 100)
    message = {"role": "user", "content": "x" * 1000}
    assert len(chat_template.render("{{ messages[0].content }}", [message], {}, "m")) == 1000
    with pytest.raises(
        ValueError, match="m: the chat template .* longer than 1,1.. characters"
    ):
        chat_template.render("{{ messages[0].content * 2 }}", [message], {}, "m")


def test_a_process_that_dies_is_told(monkeypatch):
    """As one does that the system stops, or whose stack overflows."""
    monkeypatch.setattr(chat_template, "MAX_BYTES", "none")
    with pytest.raises(
        ValueError, match="m: the chat template .* ended with status 1 TypeError"
    ):
        chat_template.render("x", [], {}, "m")
    monkeypatch.setattr(chat_template.sys, "executable", "/no/python")
    with pytest.raises(ValueError, match="m: the chat template .* cannot be started"):
        chat_template.render("x", [], {}, "m")


def test_a_text_without_tokens_is_refused():
    from tokenizers.normalizers import Strip

    hf = with_template("{{ ' \n ' }}")
    hf.backend_tokenizer.normalizer = Strip()
    with pytest.raises(ValueError, match="some/model: the chat template renders ' .* no token"):
        HFTokenizer(hf).apply_chat_template([])


def nested(depth):
    value = []
    for _ in range(depth):
        value = [value]
    return value


NO_JSON = {"bytes": b"x", "surrogate": "\ud800", "key": {1j: 2}, "depth": nested(100_000)}


@pytest.mark.parametrize("kind", NO_JSON)
def test_messages_that_are_not_json_are_refused(kind):
    extra = NO_JSON[kind]
    with pytest.raises(ValueError, match="messages cannot be written as JSON"):
        chat_template.render("x", [{"role": "user", "content": "", "extra": extra}], {}, "m")


# ---- chat --------------------------------------------------------------------------------


def test_chat_raises_value_error_for_what_a_template_refuses():
    llm = LLM("tiny", dtype="float32", num_blocks=8)
    refuses = "{{ raise_exception('System role not supported') }}"
    llm.tokenizer = HFTokenizer(with_template(refuses))
    with pytest.raises(ValueError, match="some/model: the chat template .* not supported"):
        llm.chat([{"role": "system", "content": "x"}])
    assert not llm.engine.has_unfinished()
