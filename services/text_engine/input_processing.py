"""A request as it comes over the wire, made into what the engine takes: its fields checked, its prompt tokenized.

Pure work on one request: any thread will do, and a long prompt takes it milliseconds.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from services.text_engine.build import BuiltEngine
from services.text_engine.engine_io import EngineRequest
from services.text_engine.prompt import Prompt
from shared.errors import ContextTooLong, InvalidRequest
from shared.sampling import WHOLE_RANGES, Constraint, SamplingParams
from shared.wire.engine import GenerateRequest, TokenizeRequest


def num_choices(request: GenerateRequest) -> int:
    """Before its sampling fields are checked; 1 for a number that will be refused."""
    given, (least, most) = request.sampling.get("n"), WHOLE_RANGES["n"]
    return given if type(given) is int and least <= given and (most is None or given <= most) else 1


def read_request(built: BuiltEngine, request: GenerateRequest) -> EngineRequest:
    """The request as the engine takes it. Raises whatever is wrong with it."""
    sampling = sampling_params(request)
    prompt = read_prompt(built, request)
    engine_request = EngineRequest(
        request_id=request.request_id,
        token_ids=prompt.token_ids,
        sampling=sampling,
        reasoning=prompt.reasoning,
        images=prompt.images,
        image_refs=prompt.image_refs,
        priority=request.priority,
        cache_salt=request.cache_salt,
        adapter=request.adapter,
        only_echoes=request.only_echoes,
    )
    try:
        built.engine.check(engine_request)
        if not request.cuts_to_context and not request.only_echoes:
            _check_max_tokens(engine_request, built.engine.max_model_len)
    except ContextTooLong as error:
        if request.prompt is not None and error.param == "messages":
            raise ContextTooLong(error.message, param="prompt") from error
        raise
    return engine_request


def read_prompt(built: BuiltEngine, request: GenerateRequest | TokenizeRequest) -> Prompt:
    if request.messages is not None:
        return built.prompts.from_messages(request.messages, request.tools, request.template_kwargs)
    if request.prompt is None:
        raise InvalidRequest("give either messages or prompt", param="messages")
    return built.prompts.from_prompt(request.prompt, built.info.vocab_size)


def sampling_params(request: GenerateRequest) -> SamplingParams:
    """The request's sampling fields, checked. Raises InvalidRequest naming the field."""
    known = {field.name for field in dataclasses.fields(SamplingParams)}
    given = {name: value for name, value in request.sampling.items() if name in known}
    for name in ("stop", "stop_token_ids", "allowed_token_ids", "bad_words"):
        if isinstance(given.get(name), list):
            given[name] = tuple(given[name])
    if "logit_bias" in given:
        given["logit_bias"] = _logit_bias(given["logit_bias"])
    if "constraint" in given:
        given["constraint"] = _constraint(given["constraint"])
    return SamplingParams(**given)


def _logit_bias(given: object) -> dict[int, Any]:
    """Keys are strings in JSON. Raises InvalidRequest for anything but an object from token ids to numbers."""
    if not isinstance(given, dict):
        raise InvalidRequest(f"logit_bias is {given!r}; give an object from token ids to numbers", param="logit_bias")
    try:
        return {int(token_id): bias for token_id, bias in given.items()}
    except ValueError:
        raise InvalidRequest(f"logit_bias has keys {list(given)}; they must be token ids", param="logit_bias") from None


def _constraint(given: object) -> Constraint:
    """Raises InvalidRequest for anything but an object with a constraint's fields."""
    try:
        return Constraint(**given)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidRequest("constraint is an object with a kind and a value", param="constraint") from None


def _check_max_tokens(request: EngineRequest, max_model_len: int) -> None:
    """Raises ContextTooLong if more is asked for than can follow the prompt. Cutting it would be an answer to another
    question; the KV cache being smaller than the context is not the client's to know, so that cuts."""
    asked, num_left = request.sampling.max_tokens, max_model_len - len(request.token_ids)
    if asked is not None and asked > num_left:
        raise ContextTooLong(
            f"max_tokens is {asked}, but the prompt has {len(request.token_ids)} tokens and this model takes "
            f"{max_model_len} tokens of prompt and answer together; ask for at most {num_left}, or leave max_tokens "
            "out to use what is left",
            param="max_tokens",
        )
