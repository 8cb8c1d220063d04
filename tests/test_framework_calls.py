"""Every call of tests/framework_calls.toml binds to our signatures, and every attribute is there."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch

import elastic_cases
import uccl_ep
import uccl_ep.utils
from ranks import Context, RankPool
from uccl_ep_core.files import tomllib

RECORDED = tomllib.loads((Path(__file__).parent / "framework_calls.toml").read_text())
VARIADIC = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


def ids(entries: list[dict[str, Any]]) -> list[Any]:
    return [pytest.param(entry, id=f"{entry.get('target', entry.get('of'))}-{entry['by']}") for entry in entries]


def signature(target: str) -> inspect.Signature:
    """As a caller sees it: without self."""
    name, _, method = target.partition(".")
    owner = getattr(uccl_ep, name)
    if not method:
        return inspect.signature(owner)
    own = inspect.signature(getattr(owner, method))
    if isinstance(inspect.getattr_static(owner, method), staticmethod):
        return own
    return own.replace(parameters=list(own.parameters.values())[1:])


@pytest.mark.parametrize("call", ids(RECORDED["call"]))
def test_call_binds(call: dict[str, Any]) -> None:
    positional, keywords = call.get("positional", []), call.get("keywords", [])
    bound = signature(call["target"]).bind(*positional, **{name: name for name in keywords})
    # Each value is the name of the parameter that it must have reached, and none that takes what is left over.
    assert bound.arguments == {name: name for name in (*positional, *keywords)}


@pytest.mark.parametrize("entry", ids(RECORDED["signature"]))
def test_signature_is_the_recorded_one(entry: dict[str, Any]) -> None:
    namespace: dict[str, Any] = {}
    exec(f"def recorded({entry['parameters']}): ...", namespace)
    ours = signature(entry["target"])
    for i, (name, parameter) in enumerate(inspect.signature(namespace["recorded"]).parameters.items()):
        assert list(ours.parameters)[i] == name
        if parameter.default is not inspect.Parameter.empty:
            assert ours.parameters[name].default == parameter.default, name
        assert ours.parameters[name].kind is inspect.Parameter.POSITIONAL_OR_KEYWORD, name


def test_signatures_are_honest() -> None:
    """Callers look for parameters by inspect.signature: only where the interface says that what is unknown is left
    aside does anything take it."""
    open_ended = {"Buffer", "Config"}
    for target in {call["target"] for call in RECORDED["call"]}:
        kinds = {parameter.kind for parameter in signature(target).parameters.values()}
        assert not kinds & set(VARIADIC) or target in open_ended, target


@pytest.mark.parametrize("entry", ids(RECORDED["absent"]))
def test_absent(entry: dict[str, Any]) -> None:
    assert not [name for name in entry["names"] if hasattr(uccl_ep, name)]


def missing_attributes(ctx: Context) -> list[str]:
    buffer, elastic = ctx.buffer(), elastic_cases.elastic_buffer(ctx)
    ids = torch.tensor([[0, 1]])
    _, _, _, handle, event = elastic.dispatch(torch.zeros(1, 8), ids, num_experts=2, num_max_tokens_per_rank=1)
    objects = {
        "uccl_ep": uccl_ep, "uccl_ep.utils": uccl_ep.utils, "buffer": buffer, "elastic_buffer": elastic,
        "elastic_handle": handle, "event": event,
    }  # fmt: skip
    return [
        f"{entry['of']}.{name} ({entry['by']})"
        for entry in RECORDED["attributes"]
        for name in entry["names"]
        if not hasattr(objects[entry["of"]], name)
    ]


def test_attributes(pool: RankPool) -> None:
    assert pool.run(missing_attributes, ranks=2) == [[], []]
