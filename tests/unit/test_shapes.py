"""Every shape of record, and every defect: one pair or one named error, and never a changed pair."""

from __future__ import annotations

import copy
import csv
import json
import pickle
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from isopref.data.chat import PairEncoder
from isopref.data.pairs import SourceSpec, TokenizeOptions, build_table
from isopref.data.shapes import BadPairError, PreferencePair, Shape, detect_shape, to_pair
from isopref.data.sources import Record, read_source
from isopref.errors import DataError
from isopref.testing.tokenizers import tiny_tokenizer

SHARED = Path(__file__).parents[3] / "shared" / "data" / "dpo_en_demo.json"  # beside the checkout, where it is


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def pair_of(fields: dict[str, Any], *, raw: bool = False) -> PreferencePair:
    record = Record(fields, "file:7")
    return to_pair(record, detect_shape([record], raw=raw), raw=raw)


Q, GOOD, BAD = user("why?"), assistant("because"), assistant("dunno")
SYSTEM = {"role": "system", "content": "be brief"}
TEXT = {"prompt": "why?", "chosen": "because", "rejected": "dunno"}
HH = {
    "chosen": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: why?\n\nAssistant: because",
    "rejected": "\n\nHuman: hi\n\nAssistant: hello\n\nHuman: why?\n\nAssistant: dunno",
}
HH_PROMPT = HH["chosen"].removesuffix(" because")
HH_TURNS = [user("hi"), assistant("hello"), Q]
SHAREGPT = {
    "conversations": [{"from": "system", "value": "be brief"}, {"from": "human", "value": "why?"}],
    "chosen": {"from": "gpt", "value": "because"},
    "rejected": {"from": "gpt", "value": "dunno"},
}
ULTRAFEEDBACK = {
    "prompt": "why?",
    "prompt_id": "x",
    "messages": [Q, GOOD],
    "chosen": [Q, GOOD],
    "rejected": [Q, BAD],
    "score_chosen": 9.0,
}

# shape, record, prompt, chosen, rejected
SHAPED: list[tuple[str, dict[str, Any], Any, Any, Any]] = [
    ("text", TEXT, "why?", "because", "dunno"),
    ("messages", {"prompt": [SYSTEM, Q], "chosen": [GOOD], "rejected": [BAD]}, [SYSTEM, Q], [GOOD], [BAD]),
    ("messages", {"prompt": [Q], "chosen": GOOD, "rejected": BAD}, [Q], [GOOD], [BAD]),
    ("messages", {"prompt": [Q], "chosen": "because", "rejected": "dunno"}, [Q], "because", "dunno"),
    ("messages", {"prompt": "why?", "chosen": [GOOD], "rejected": [BAD]}, "why?", [GOOD], [BAD]),
    ("conversations", {"chosen": [Q, GOOD], "rejected": [Q, BAD]}, [Q], [GOOD], [BAD]),
    ("conversations", {"chosen": [*HH_TURNS, GOOD], "rejected": [*HH_TURNS, BAD]}, HH_TURNS, [GOOD], [BAD]),
    ("ultrafeedback", ULTRAFEEDBACK, [Q], [GOOD], [BAD]),
    ("sharegpt", SHAREGPT, [SYSTEM, Q], [GOOD], [BAD]),
    ("hh", HH, HH_TURNS, [GOOD], [BAD]),
    ("hh", {"prompt": HH_PROMPT, "chosen": " because", "rejected": " dunno"}, HH_TURNS, [GOOD], [BAD]),
    ("hh", {"prompt": HH_PROMPT, **HH}, HH_TURNS, [GOOD], [BAD]),
]


@pytest.mark.parametrize(("name", "fields", "prompt", "chosen", "rejected"), SHAPED)
def test_every_shape_is_found_and_split(
    name: str, fields: dict[str, Any], prompt: Any, chosen: Any, rejected: Any
) -> None:
    assert detect_shape([Record(fields, "f:1")], raw=False).name == name
    assert pair_of(fields) == PreferencePair(prompt, chosen, rejected, None, 1.0, "file:7")


def test_hh_without_a_template_keeps_the_text_as_it_stands() -> None:
    for fields in (HH, {"prompt": HH_PROMPT, "chosen": " because", "rejected": " dunno"}):
        pair = pair_of(fields, raw=True)
        assert (pair.prompt, pair.chosen, pair.rejected) == (HH_PROMPT, " because", " dunno")


def test_messages_without_a_template_are_refused_by_name() -> None:
    with pytest.raises(DataError, match=r"f:1: records of shape 'sharegpt'.*data\.template: path\.jinja"):
        detect_shape([Record(SHAREGPT, "f:1")], raw=True)


def test_optional_columns() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    pair = pair_of(TEXT | {"system": "be brief", "tools": json.dumps(tools), "weight": "2.5"})
    assert (pair.prompt, pair.tools, pair.weight) == ([SYSTEM, Q], tools, 2.5)
    assert pair_of(TEXT | {"system": "", "tools": [], "weight": None}) == pair_of(TEXT)
    assert pair_of(HH | {"system": "be brief"}).prompt == [SYSTEM, *HH_TURNS]


@pytest.mark.parametrize(("column", "value"), [("system", "be brief"), ("tools", '[{"name": "add"}]')])
def test_columns_that_have_no_place_in_raw_text(column: str, value: str) -> None:
    assert pair_of(TEXT | {"tools": "[]"}, raw=True).tools is None
    with pytest.raises(DataError, match=f"file:7: the column '{column}'") as caught:
        pair_of(TEXT | {column: value}, raw=True)
    assert not isinstance(caught.value, BadPairError)  # the config is wrong, not the record


def test_sharegpt_tool_roles_are_mapped() -> None:
    call = {"name": "add", "arguments": {"a": 1}}
    turns = [
        {"from": "human", "value": "1+1?"},
        {"from": "function_call", "value": json.dumps(call)},
        {"from": "observation", "value": "2"},
    ]
    assert pair_of(SHAREGPT | {"conversations": turns}).prompt == [
        user("1+1?"),
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "content": "2"},
    ]


def test_keys_that_a_column_of_structs_fills_with_none_are_left_out() -> None:
    turn = {"role": "user", "content": "why?", "tool_calls": None, "name": None}
    assert pair_of({"prompt": [turn], "chosen": [GOOD], "rejected": [BAD]}).prompt == [Q]


UNKNOWN: list[dict[str, Any]] = [
    {"question": "why?", "chosen": "because", "rejected": "dunno"},
    {"instruction": "why?", "output": ["because", "dunno"]},
    {"chosen": "because", "rejected": "dunno"},
    SHAREGPT | {"prompt": "why?"},  # two prompts: which?
    {"prompt": "why?", "chosen": "because", "rejected": [BAD]},
    {},
]


@pytest.mark.parametrize("fields", UNKNOWN)
def test_an_unknown_shape_lists_columns_shapes_and_the_way_out(fields: dict[str, Any]) -> None:
    with pytest.raises(DataError) as caught:
        detect_shape([Record(fields, "f:1")], raw=False)
    for part in ("f:1: ", "data.columns", "sharegpt", "ultrafeedback", "hh", "text", *fields):
        assert part in str(caught.value)


RENAMED: list[tuple[dict[str, Any], str]] = [
    ({"question": "why?", "chosen": "a", "rejected": "b"}, "{prompt: question}"),
    ({"Prompt": "why?", "Chosen": "a", "Rejected": "b"}, "{prompt: Prompt, chosen: Chosen, rejected: Rejected}"),
    (
        {"prompt": "why?", "chosen_response": "a", "rejected_response": "b", "id": 1},
        "{chosen: chosen_response, rejected: rejected_response}",
    ),
    ({"messages": [Q], "chosen": "a", "rejected": "b"}, "{prompt: messages}"),
    ({"instruction": "why?", "input": "", "chosen": "a", "rejected": "b"}, "{prompt: instruction}"),
    (
        {"query": "why?", "answerGood": "a", "bad answer:": "b"},
        '{prompt: query, chosen: answerGood, rejected: "bad answer:"}',
    ),
    ({"prompt": None, "problem": "why?", "chosen": "a", "rejected": "b"}, "{prompt: problem}"),
    ({"CHOSEN": HH["chosen"], "REJECTED": HH["rejected"]}, "{chosen: CHOSEN, rejected: REJECTED}"),
]


@pytest.mark.parametrize(("fields", "columns"), RENAMED)
def test_columns_of_other_names_are_suggested_as_they_work(
    fields: dict[str, Any], columns: str, tmp_path: Path
) -> None:
    with pytest.raises(DataError) as caught:
        detect_shape([Record(fields, "f:1")], raw=False)
    assert f" Set data.columns={columns}. The shapes" in str(caught.value)
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps(fields))
    assert detect_shape(list(read_source(str(path), columns=yaml.safe_load(columns))), raw=False)


def test_a_suggestion_keeps_the_columns_that_are_set_and_only_names_what_would_do() -> None:
    first = Record({"question": "why?", "chosen": "a", "rejected": "b"}, "f:1")
    with pytest.raises(DataError, match=r"Set data\.columns=\{chosen: good, prompt: question\}\. "):
        detect_shape([first], raw=False, columns={"chosen": "good", "prompt": "qestion"})
    with pytest.raises(DataError, match=r"Rename columns with data\.columns \(ours: theirs\)\. "):
        detect_shape([Record({"question": 3, "chosen": "a", "rejected": "b"}, "f:1")], raw=False)


def test_answers_alone_name_the_column_that_may_be_the_prompt() -> None:
    with pytest.raises(BadPairError, match=r"'messages' is not read \(data\.columns=\{prompt: messages\} reads it\)"):
        pair_of({"messages": [Q], "chosen": [GOOD], "rejected": [BAD]})


def test_the_first_record_with_a_shape_decides_for_the_source() -> None:
    records = [Record({"prompt": "p"}, "f:1"), Record(TEXT, "f:2"), Record(HH, "f:3")]
    shape = detect_shape(records, raw=False)
    assert shape.name == "text"
    with pytest.raises(BadPairError, match="f:1: 'chosen' is missing"):
        to_pair(records[0], shape, raw=False)
    with pytest.raises(BadPairError, match="f:3: shape 'hh' in a source of shape 'text'"):
        to_pair(records[2], shape, raw=False)


# --- messages written as text ---------------------------------------------------------------------------


def printed_by_numpy(value: Any) -> str:
    """What pandas writes to CSV for a column of lists that came from Parquet."""
    return str(np.array(value, dtype=object)) if isinstance(value, list) else str(value)


TRICKY = user("He said \"it's } {\"\n in C: {} {}, [{'role': 'user'}] and \\n")
WRITERS: list[Callable[[Any], str]] = [json.dumps, str, printed_by_numpy, lambda value: json.dumps(value, indent=1)]


def as_text(fields: dict[str, Any], write: Callable[[Any], str]) -> dict[str, Any]:
    return {key: value if isinstance(value, str | float) else write(value) for key, value in fields.items()}


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize(
    ("name", "fields", "prompt", "chosen", "rejected"), [case for case in SHAPED if case[0] not in ("text", "hh")]
)
def test_messages_written_as_text_are_read(
    name: str, fields: dict[str, Any], prompt: Any, chosen: Any, rejected: Any, write: Callable[[Any], str]
) -> None:
    text = as_text(fields, write)
    assert isinstance(text["chosen"], str)
    assert detect_shape([Record(text, "f:1")], raw=False).name == name
    assert pair_of(text) == PreferencePair(prompt, chosen, rejected, None, 1.0, "file:7")


@pytest.mark.parametrize("write", WRITERS)
def test_characters_in_messages_written_as_text_are_kept(write: Callable[[Any], str]) -> None:
    long = assistant("because } { " * 20)
    pair = pair_of(as_text({"chosen": [TRICKY, long], "rejected": [TRICKY, BAD]}, write))
    assert (pair.prompt, pair.chosen, pair.rejected) == ([TRICKY], [long], [BAD])


def test_one_odd_text_decides_nothing() -> None:
    odd = TEXT | {side: json.dumps([message]) for side, message in (("chosen", GOOD), ("rejected", BAD))}
    records = [Record(odd, "f:1"), Record(TEXT, "f:2"), Record(TEXT, "f:3")]
    shape = detect_shape(records, raw=False)
    assert shape.name == "text"
    assert to_pair(records[0], shape, raw=False).chosen == odd["chosen"]

    records = [Record(TEXT, "f:1"), Record(odd, "f:2"), Record(odd, "f:3")]
    shape = detect_shape(records, raw=False)
    assert shape.name == "messages"
    assert to_pair(records[1], shape, raw=False).chosen == [GOOD]
    with pytest.raises(BadPairError, match=r"f:1: '\w+' is messages written as text in this source, here it is str"):
        to_pair(records[0], shape, raw=False)
    cut = odd | {"chosen": odd["chosen"][:-9]}
    with pytest.raises(BadPairError, match=r"f:4: 'chosen' is messages written as text in this source"):
        to_pair(Record(cut, "f:4"), shape, raw=False)


def test_messages_written_in_another_way_are_refused() -> None:
    text = f"[{{'role': 'user', 'content': array(['why?'], dtype=object)}} {GOOD}]"
    with pytest.raises(DataError, match=r"f:1: 'chosen' looks like messages.*Write the file as JSONL or Parquet"):
        detect_shape([Record({"chosen": text, "rejected": text}, "f:1")], raw=False)


@pytest.mark.parametrize("text", ['{"from": "a", "to": "b"}', '[{"value": 3}]', "[{'role': 'x'}]", "{content: 'a'}"])
def test_objects_that_are_no_messages_stay_text(text: str) -> None:
    assert pair_of(TEXT | {"prompt": text, "chosen": text}).chosen == text


def test_conversations_that_pandas_wrote_to_csv(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, list(ULTRAFEEDBACK))
        writer.writeheader()
        writer.writerows([as_text(ULTRAFEEDBACK, printed_by_numpy)] * 3)
    tokenizer = tiny_tokenizer("chatml")
    options = TokenizeOptions(template=None, max_length=None, truncation="drop", on_bad="error")
    table = build_table([SourceSpec(str(path))], tokenizer, folder=tmp_path, options=options)
    assert table.stats.sources[0].shape == "ultrafeedback"
    tokens = table.tokens(0)
    assert tokenizer.decode(tokens.prompt) == "<|im_start|>user\nwhy?<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokens.chosen) == "because<|im_end|>"


# --- defects --------------------------------------------------------------------------------------------

# base record, what is changed in it (None: removed), reason
MESSAGES = {"prompt": [Q], "chosen": [GOOD], "rejected": [BAD]}
CONVERSATIONS = {"chosen": [Q, GOOD], "rejected": [Q, BAD]}
DEFECTS: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    (TEXT, {"rejected": "because"}, "tie"),
    (TEXT, {"chosen": ""}, "empty"),
    (TEXT, {"rejected": " \n"}, "empty"),
    (TEXT, {"prompt": ""}, "empty"),
    (TEXT, {"chosen": None}, "missing"),
    (TEXT, {"prompt": None}, "missing"),
    (TEXT, {"prompt": 3}, "type"),
    (TEXT, {"chosen": ["a", "b"]}, "type"),
    (TEXT, {"chosen": "half \ud800"}, "type"),
    (TEXT, {"chosen": [GOOD]}, "shape"),
    (TEXT, {"prompt": [Q]}, "shape"),
    (TEXT, {"system": 3}, "type"),
    (TEXT, {"weight": 0}, "weight"),
    (TEXT, {"weight": -1.0}, "weight"),
    (TEXT, {"weight": float("nan")}, "weight"),
    (TEXT, {"weight": float("inf")}, "weight"),
    (TEXT, {"weight": 10**400}, "weight"),
    (TEXT, {"weight": True}, "weight"),
    (TEXT, {"weight": "heavy"}, "weight"),
    (TEXT, {"weight": [1]}, "weight"),
    (TEXT, {"tools": "not json"}, "tools"),
    (TEXT, {"tools": '{"a": 1}'}, "tools"),
    (TEXT, {"tools": [1]}, "tools"),
    (MESSAGES, {"prompt": []}, "empty"),
    (MESSAGES, {"prompt": [Q, GOOD]}, "role"),
    (MESSAGES, {"prompt": [{"role": "robot", "content": "x"}]}, "role"),
    (MESSAGES, {"prompt": [{"role": ["user"], "content": "x"}]}, "role"),
    (MESSAGES, {"prompt": [{"role": "user", "content": None}]}, "type"),
    (MESSAGES, {"prompt": [{"role": "user", "content": [{"type": "text", "text": "x"}]}]}, "type"),
    (MESSAGES, {"prompt": [{"role": "user"}]}, "type"),
    (MESSAGES, {"prompt": [SYSTEM, Q], "system": "be long"}, "role"),
    (MESSAGES, {"chosen": [user("x")]}, "role"),
    (MESSAGES, {"chosen": [GOOD, Q, GOOD]}, "role"),
    (MESSAGES, {"chosen": []}, "role"),
    (MESSAGES, {"chosen": [assistant(" ")]}, "empty"),
    (MESSAGES, {"chosen": [{"role": "assistant", "content": "", "tool_calls": "add"}]}, "tools"),
    (CONVERSATIONS, {"chosen": [user("other"), GOOD]}, "diverging"),
    (CONVERSATIONS, {"chosen": [Q, GOOD, Q, GOOD]}, "diverging"),
    (CONVERSATIONS, {"chosen": [GOOD], "rejected": [BAD]}, "empty"),
    (CONVERSATIONS, {"chosen": [Q, Q]}, "role"),
    (CONVERSATIONS, {"chosen": [SYSTEM, Q, GOOD, GOOD], "rejected": [SYSTEM, Q, GOOD, BAD]}, "role"),
    (ULTRAFEEDBACK, {"prompt": "something else"}, "shape"),
    (SHAREGPT, {"chosen": {"from": "bard", "value": "x"}}, "role"),
    (SHAREGPT, {"chosen": {"from": 3, "value": "x"}}, "role"),
    (SHAREGPT, {"chosen": {"from": "gpt"}}, "type"),
    (SHAREGPT, {"chosen": {"from": "function_call", "value": "add(1)"}}, "tools"),
    (SHAREGPT, {"chosen": {"from": "function_call", "value": "[]"}}, "tools"),
    (SHAREGPT, {"conversations": None}, "shape"),
    (HH, {"chosen": "\n\nHuman: other\n\nAssistant: because"}, "diverging"),
    (HH, {"chosen": HH["chosen"] + "\n\nHuman: thanks", "rejected": HH["chosen"] + "\n\nHuman: ok"}, "role"),
    (HH, {"chosen": HH_PROMPT}, "empty"),
    (HH, {"chosen": "because"}, "missing"),
]


@pytest.mark.parametrize(("base", "change", "reason"), DEFECTS)
def test_every_defect_is_named_with_its_origin_and_the_way_out(
    base: dict[str, Any], change: dict[str, Any], reason: str
) -> None:
    shape = detect_shape([Record(base, "f:1")], raw=False)
    fields = {key: value for key, value in (base | change).items() if value is not None}
    with pytest.raises(BadPairError) as caught:
        to_pair(Record(fields, "f:2"), shape, raw=False)
    assert caught.value.reason == reason
    assert str(caught.value).startswith("f:2: ")
    assert str(caught.value).endswith("Remove it, or set data.on_bad: drop.")
    again = pickle.loads(pickle.dumps(caught.value))  # it has to come back from worker processes
    assert (str(again), again.reason) == (str(caught.value), reason)


@pytest.mark.skipif(not SHARED.exists(), reason="needs the shared data folder")
def test_a_real_sharegpt_file_reads_whole() -> None:
    source = read_source(str(SHARED))
    records = list(source)
    shape = detect_shape(records, raw=False)
    assert (source.format, shape.name) == ("json", "sharegpt")
    for record in records:
        pair = to_pair(record, shape, raw=False)
        assert [turn["content"] for turn in pair.prompt if isinstance(turn, dict)] == [
            turn["value"] for turn in record.fields["conversations"]
        ]
        assert pair.chosen == [assistant(record.fields["chosen"]["value"])]
        assert pair.rejected == [assistant(record.fields["rejected"]["value"])]


# --- fuzz -----------------------------------------------------------------------------------------------


def junk(rng: random.Random) -> Any:
    deep: Any = "x"
    for _ in range(rng.choice([3, 400])):
        deep = [deep]
    values = [None, "", " ", 0, -1, 1.5, True, float("nan"), 10**400, [], {}, [[]], [{}], "\ud800", "\x00", deep]
    values += [{"role": "assistant"}, {"from": "gpt", "value": "x"}, [{"role": "user", "content": 3}], [GOOD, Q]]
    return copy.deepcopy(rng.choice(values))  # a later fault may reach into it


def broken(base: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    """A copy of `base` with one to three faults, at the top or inside messages. Some are harmless."""
    record: dict[str, Any] = json.loads(json.dumps(base))
    for _ in range(rng.randint(1, 3)):
        places: list[tuple[Any, Any]] = [(record, key) for key in [*record, "weight", "system", "tools"]]
        for value in record.values():
            for turn in value if isinstance(value, list) else [value]:
                if isinstance(turn, dict):
                    places += [(turn, key) for key in turn]
        holder, key = rng.choice(places)
        if rng.random() < 0.3:
            holder.pop(key, None)
        elif rng.random() < 0.3 and "chosen" in record:
            record["rejected"] = record["chosen"]
        else:
            holder[key] = junk(rng)
    return record


BASES: dict[str, tuple[dict[str, Any], str | None]] = {
    "text": (TEXT, "none"),
    "hh": (HH, "none"),
    "messages": (MESSAGES, None),
    "conversations": (CONVERSATIONS, None),
    "sharegpt": (SHAREGPT, None),
}


def oracle(shape: str, fields: dict[str, Any]) -> tuple[str, ...]:
    """What the two sequences must say: straight from the record, without a check."""
    sides = (fields["chosen"], fields["rejected"])
    if shape == "text":
        return tuple(fields["prompt"] + side + "</s>" for side in sides)
    if shape == "hh":
        before = fields.get("prompt") or ""
        return tuple((side if side.startswith("\n\nHuman:") else before + side) + "</s>" for side in sides)
    system = [{"role": "system", "content": fields["system"]}] if fields.get("system") else []
    return tuple(chatml([*system, fields.get("prompt"), fields.get("conversations"), side]) for side in sides)


def chatml(turns: list[Any]) -> str:
    text = ""
    for turn in turns:
        if isinstance(turn, list):
            text += chatml(turn) + "\n" * bool(turn)
        elif turn is not None:
            role = "user" if isinstance(turn, str) else turn.get("role") or turn["from"]
            said = turn if isinstance(turn, str) else turn["content"] if "role" in turn else turn["value"]
            text += f"<|im_start|>{ {'human': 'user', 'gpt': 'assistant'}.get(role, role) }\n{said}<|im_end|>\n"
    return text.removesuffix("\n")


def refusal(record: Record, shape: Shape, encoder: PairEncoder) -> BadPairError:
    try:
        pair = to_pair(record, shape, raw=encoder.options.raw)
    except BadPairError as bad:
        return bad
    assert pair.tools, "of good records ChatML leaves out nothing else"
    (result,) = encoder.encode([pair])
    assert isinstance(result, BadPairError)
    return result


@pytest.mark.parametrize("shape", BASES)
def test_broken_records_are_errors_or_dropped_and_never_changed(shape: str, tmp_path: Path) -> None:
    rng = random.Random(f"fuzz {shape}")
    base, template = BASES[shape]
    records = [base, *(broken(base, rng) for _ in range(2000))]
    if template == "none":  # a system prompt or tools in raw text are an error of the config, whatever on_bad says
        for fields in records:
            fields.pop("system", None)
            fields.pop("tools", None)
    path = tmp_path / "fuzz.jsonl"
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    tokenizer = tiny_tokenizer("chatml")
    options = TokenizeOptions(template=template, max_length=None, truncation="drop", on_bad="drop")
    table = build_table([SourceSpec(str(path))], tokenizer, folder=tmp_path, options=options)
    assert table.stats.read == len(records) == len(table) + sum(table.stats.dropped.values())
    assert 50 < len(table) < 1500, "the fuzz must produce both kinds"

    kept = {}
    for index in range(len(table)):
        prompt, chosen, rejected = (part.tolist() for part in table.tokens(index))
        kept[table.origin(index)] = (tokenizer.decode(prompt + chosen), tokenizer.decode(prompt + rejected))
    reasons: Counter[str] = Counter()
    encoder = PairEncoder(tokenizer, options)
    found = detect_shape([Record(base, "")], raw=template == "none")
    for record in read_source(str(path)):
        if record.origin in kept:
            assert kept[record.origin] == oracle(shape, record.fields)
            continue
        bad = refusal(record, found, encoder)
        assert str(bad).startswith(f"{record.origin}: ")
        reasons[bad.reason] += 1
    assert reasons == table.stats.dropped
