"""Log-probabilities of a prompt's tokens in answers: in OpenAI's form for `echo`, and in vLLM's `prompt_logprobs`."""

from __future__ import annotations

from typing import Any

from deepspeed.inference.detokenizer import TextStream
from deepspeed.inference.token_bytes import decode_function
from deepspeed.serving.ipc import ScoredToken
from deepspeed.serving.responses import LOWEST, ResponseChoice, TokenInfo


def prompt_infos(
    tokenizer: Any, tokens: list[int], text: str, most: int, entries: list[ScoredToken | None]
) -> list[TokenInfo]:
    """Return the log-probabilities of a prompt, whose text an answer repeats; the first token has none.

    Args:
        tokenizer: the model's tokenizer.
        tokens: the prompt.
        text: its text; special tokens that are not in it, such as a first token that the tokenizer adds, have no width.
        most: number of alternatives per token.
        entries: what the engine reports of each token; None for the first.
    """
    special = set(getattr(tokenizer, "all_special_ids", ()))
    stream, infos, before = TextStream(tokenizer), [], 0
    for token, entry in zip(tokens, entries, strict=True):
        value, top = (None, ()) if entry is None else (entry.logprob, entry.top[:most])
        pieces: list[tuple[int, float | None, bytes]] = [(token, value, stream.piece(token))]
        pieces += [(other, number, stream.piece(other)) for other, number in top]
        infos.append(TokenInfo(pieces, min(stream.offset(token), len(text)), ends=False))
        if token in special and not text.startswith(pieces[0][2].decode("utf-8", "replace"), before):
            continue
        before += len(stream.push([token]))
    return infos


def prompt_logprobs(tokenizer: Any, entries: list[ScoredToken | None]) -> list[dict[str, Any] | None]:
    """Return the log-probabilities of a prompt in vLLM's form: for each token {its number: logprob, rank, text}."""
    decode = decode_function(tokenizer, False)
    texts: dict[int, str] = {}

    def described(token: int, value: float, rank: int) -> dict[str, Any]:
        if token not in texts:
            try:
                texts[token] = decode([token])
            except (IndexError, KeyError, OverflowError):  # a row of the model without a token
                texts[token] = ""
        return {"logprob": max(value, LOWEST), "rank": rank, "decoded_token": texts[token]}

    form: list[dict[str, Any] | None] = []
    for entry in entries:
        if entry is None:
            form.append(None)
            continue
        tops = {str(token): described(token, value, rank) for rank, (token, value) in enumerate(entry.top, 1)}
        form.append({str(entry.token): described(entry.token, entry.logprob, entry.rank), **tops})
    return form


def attach(body: dict[str, Any], choices: list[ResponseChoice], tokenizer: Any, most: int) -> dict[str, Any]:
    """Return the response `body` with `prompt_logprobs` as vLLM's: of each choice, or in a chat of the whole response.

    Args:
        body: response to a request without streaming.
        choices: its finished choices.
        tokenizer: the model's tokenizer.
        most: number of alternatives per token.
    """
    forms: dict[int, Any] = {}
    for choice in choices:
        if id(choice.prompt) not in forms:  # answers to one prompt have one list
            cut = [entry and entry._replace(top=entry.top[:most]) for entry in choice.scored or ()]
            forms[id(choice.prompt)] = prompt_logprobs(tokenizer, cut)
    if body["object"] == "chat.completion":
        return body | {"prompt_logprobs": forms[id(choices[0].prompt)]}
    parts = zip(body["choices"], choices, strict=True)
    return body | {"choices": [part | {"prompt_logprobs": forms[id(choice.prompt)]} for part, choice in parts]}
