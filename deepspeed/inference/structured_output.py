"""Structured output: constraints on the text of an answer, compiled to masks of tokens.

The compiler is llguidance (extra `serve`). Of the libraries that were compared, it alone takes JSON schemas, regular
expressions and grammars, refuses the keywords of a schema that it does not enforce, has one wheel for all versions of
Python and needs no other package. With the 49k tokens of SmolLM2, a mask takes 0.03 ms (median; 0.3 ms at most) and a
schema 1 ms. `xgrammar` has faster masks (0.01 ms), but it needs Triton, a compiler of 200 MB; `outlines-core` has
regular expressions only, and takes 0.2 s for a schema and 14 ms for a mask in Python.
"""

from __future__ import annotations

import json
import threading
import weakref
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from deepspeed.errors import RequestError
from deepspeed.inference.token_bytes import TokenBytes

if TYPE_CHECKING:
    import torch

KINDS = ("json_object", "json_schema", "regex", "choice", "grammar")
LONGEST = 1 << 18  # characters of a constraint
REMEMBERED = 64  # compiled constraints
# Of these, the time to compile grows with the square: 2,000 take 0.6 s, 4,000 take 2.3 s, without any effect on others.
LARGEST = 2000
_GROWING = ("properties", "anyOf", "oneOf", "allOf")
# Spaces and line breaks in JSON are limited: a model that writes them without end would never finish.
WHITESPACE = r" ?|\n[ ]{0,24}|\n\t{0,8}"
# So are the fractions of a second in the formats of times.
FRACTION = r"^[^.]*(\.[0-9]{1,9}([^0-9.][^.]*)?)?$"
_LEADS = ("", "x", ":")  # texts before a text, to find the tokens of its middle
_STATES = 50_000  # of the lexer, 1 to 2 kB each


@dataclass(frozen=True)
class StructuredOutput:
    """Constraint on the text of an answer.

    Args:
        kind: "json_object", "json_schema", "regex", "choice" or "grammar".
        value: the schema as JSON, the regular expression (Rust's syntax, for the whole text, digits being 0 to 9),
            the choices, or the grammar (Lark, or GBNF of llama.cpp); "" for "json_object".
        lead: rules in Lark, one of them named `lead`, for a text before the constrained one, such as reasoning; "":
            none.
        field: name of the request's field in error messages.

    Raises:
        RequestError: the kind is unknown, or the value is empty, too long or of a wrong type; the message begins with
            `field`.
    """

    kind: str
    value: str | tuple[str, ...] = ""
    lead: str = ""
    field: str = "structured"

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise RequestError(f"{self.field}: {self.kind!r} is none of {', '.join(KINDS)}")
        texts: Any = self.value if self.kind == "choice" else (self.value,)
        if isinstance(texts, str) or not texts or any(not isinstance(text, str) for text in texts):
            wanted = "strings" if self.kind == "choice" else "a text"
            raise RequestError(f"{self.field}: a {self.kind} is {wanted}, not {self.value!r:.80}")
        if self.kind != "json_object" and not all(texts):
            raise RequestError(f"{self.field}: a {self.kind} is not empty")
        if sum(map(len, texts)) + len(self.lead) > LONGEST:
            raise RequestError(f"{self.field}: a constraint has at most {LONGEST} characters")
        try:
            "".join(texts).encode()
        except UnicodeEncodeError as error:
            raise RequestError(f"{self.field}: no valid text: {error}") from None


def _parts(schema: Any) -> Iterator[dict[str, Any]]:
    """Iterate over the objects of a JSON schema, without those in the values of `enum` and `const`."""
    waiting = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            yield part
            waiting += [value for key, value in part.items() if key not in ("enum", "const")]
        elif isinstance(part, list):
            waiting += part


def check_schema(schema: Any) -> None:
    """Raise ValueError if a JSON schema has parts that would take too long to compile."""
    for part in _parts(schema):
        for key in _GROWING:
            if isinstance(part.get(key), dict | list) and len(part[key]) > LARGEST:
                raise ValueError(f"{key} has {len(part[key])} entries, over the maximum of {LARGEST}")


def _grammar_of(structured: StructuredOutput) -> dict[str, Any]:
    """Return the constraint in llguidance's form of a grammar; raises ValueError."""
    from llguidance import LLMatcher, regex_to_lark
    from llguidance.gbnf_to_lark import any_to_lark

    if structured.kind in ("json_object", "json_schema"):
        schema: Any = json.loads(str(structured.value)) if structured.kind == "json_schema" else {"type": "object"}
        if schema is True:
            schema = {}
        if not isinstance(schema, dict):
            raise ValueError(f"a JSON schema is an object, not {structured.value!r:.80}")
        check_schema(schema)
        schema = {key: entry for key, entry in schema.items() if key != "x-guidance"}  # options of the compiler
        for part in _parts(schema):
            if part.get("format") in ("time", "date-time") and "pattern" not in part:
                part["pattern"] = FRACTION
        options: Any = {"whitespace_pattern": WHITESPACE}
        return json.loads(LLMatcher.grammar_from_json_schema(json.dumps(schema), overrides=options))["grammars"][0]
    if structured.kind == "choice":
        choices = " | ".join(json.dumps(choice, ensure_ascii=False) for choice in structured.value)
        return {"lark_grammar": f"start: {choices}"}
    if structured.kind == "regex":
        return {"lark_grammar": f"start: /{regex_to_lark(str(structured.value), 'd')}/"}  # 'd': digits are 0 to 9
    return {"lark_grammar": any_to_lark(str(structured.value))}


def _with_lead(structured: StructuredOutput) -> str:
    """Return the whole grammar as JSON; raises ValueError."""
    grammars = [_grammar_of(structured)]
    if structured.lead:
        lead = {"name": "main", "lark_grammar": f"start: lead @body\n{structured.lead}"}
        grammars = [lead, {**grammars[0], "name": "body"}]
    return json.dumps({"grammars": grammars})


class _Vocabulary:
    """Bytes of all tokens of a model, in the form that llguidance's `TokenizerWrapper` has.

    The end token is one that no model has: end tokens are the sampler's.
    """

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokenizer: Any, table: TokenBytes, size: int) -> None:
        self._tokenizer = tokenizer
        self.eos_token_id = size
        self.tokens = [table.of_token(token) for token in range(size)] + [b"<|end of text|>"]
        special = [token for token in range(size) if table.wordless(token) and self.tokens[token]]
        self.special_token_ids = [*special, size]
        self._special = frozenset(self.special_token_ids)
        plain = (token for token in range(size) if self.tokens[token] and token not in self._special)
        self._by_bytes = {self.tokens[token]: token for token in plain}
        self._longest = max(map(len, self._by_bytes), default=0)

    def __call__(self, text: str) -> list[int]:
        """Return tokens whose bytes are `text`: where only this text can be next, llguidance allows these alone.

        Tokens of the middle of a text, since some tokenizers begin each with a space.
        """
        for lead in _LEADS:
            before = self._tokenizer(lead, add_special_tokens=False)["input_ids"] if lead else []
            tokens = self._tokenizer(lead + text, add_special_tokens=False)["input_ids"]
            rest = tokens[len(before) :]
            exact = tokens[: len(before)] == before and b"".join(self.tokens[token] for token in rest) == text.encode()
            if exact and self._special.isdisjoint(rest):
                return rest
        return self._longest_tokens(text.encode())

    def _longest_tokens(self, text: bytes) -> list[int]:
        """Return the longest token at each place, up to a byte that no token begins with."""
        tokens, start = [], 0
        while start < len(text):
            sizes = range(min(self._longest, len(text) - start), 0, -1)
            size = next((size for size in sizes if text[start : start + size] in self._by_bytes), 0)
            if not size:
                break
            tokens.append(self._by_bytes[text[start : start + size]])
            start += size
        return tokens


class CompiledConstraint:
    """Result of compiling a constraint: llguidance's matcher, or the error.

    As long as it is referenced, the compiler remembers it.
    """

    def __init__(self, value: Any) -> None:
        self.value = value


class ConstraintCompiler:
    """Compiler of the constraints of a generator's requests; thread-safe. The last `REMEMBERED` results are kept.

    Threads that ask for the same constraint at once may compile it more than once; all get one result.

    Args:
        tokenizer: the model's tokenizer; None: there is none, and constraints are refused.
        size: number of the model's tokens, which may be more than the tokenizer's; None: the tokenizer's.
    """

    def __init__(self, tokenizer: Any, size: int | None) -> None:
        self._tokenizer, self._size = tokenizer, size
        self._last: OrderedDict[StructuredOutput, CompiledConstraint] = OrderedDict()
        self._all: weakref.WeakValueDictionary[StructuredOutput, CompiledConstraint] = weakref.WeakValueDictionary()
        self._vocabulary: Any = None
        self._table: Any = None
        self._shifting: list[int] = []
        self._lock, self._reading = threading.Lock(), threading.Lock()

    def remembered(self, structured: StructuredOutput) -> CompiledConstraint | None:
        """Return the result of compiling a constraint before; None: it has to be compiled."""
        with self._lock:
            return self._all.get(structured)

    def prepare(self, structured: StructuredOutput) -> CompiledConstraint:
        """Compile a constraint, or return the result of before; errors are a result."""
        result = self.remembered(structured) or CompiledConstraint(self._compiled_or_error(structured))
        with self._lock:
            result = self._all.setdefault(structured, result)
            self._last[structured] = result
            self._last.move_to_end(structured)
            while len(self._last) > REMEMBERED:
                self._last.popitem(last=False)
        return result

    def compile(self, structured: StructuredOutput) -> Any:
        """Compile a constraint, or return it compiled before.

        Raises:
            RequestError: the constraint is invalid or too complex, names a keyword that is not enforced, or the
                tokenizer has no bytes for its tokens; the message begins with the field.
        """
        compiled = self.prepare(structured).value
        if isinstance(compiled, RequestError):
            raise RequestError(str(compiled))
        return compiled

    def matcher(self, structured: StructuredOutput, before: Sequence[int] = ()) -> Matcher:
        """Return a matcher for one answer after the tokens `before`; errors as in `compile`."""
        compiled = self.compile(structured).deep_copy()
        first = all(self._table.wordless(token) for token in before)
        return Matcher(compiled, structured.field, self._shifting if first else [])

    def _compiled_or_error(self, structured: StructuredOutput) -> Any:
        try:
            return self._compile(structured)
        except RequestError as error:
            return error
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a panic of llguidance is no Exception
            return RequestError(f"{structured.field}: cannot be compiled: {type(error).__name__}: {str(error)[:300]}")

    def _compile(self, structured: StructuredOutput) -> Any:
        try:
            import llguidance
        except ImportError:
            text = "needs the package llguidance: pip install 'deepspeed[serve]'"
            raise RequestError(f"{structured.field}: {text}") from None
        tokens = self._tokens(structured.field)
        try:
            grammar = _with_lead(structured)
        except Exception as error:  # llguidance's reader of GBNF raises plain ones
            raise RequestError(f"{structured.field}: {str(error)[:300]}") from None
        limits = llguidance.LLParserLimits(max_lexer_states=_STATES, verbose_errors=False)
        compiled = llguidance.LLMatcher(tokens, grammar, log_level=0, limits=limits)
        if not compiled.is_error():
            compiled.compute_bitmask()  # builds most of the lexer, which copies share
        if compiled.is_error():
            reason = compiled.get_error().partition("\n")[0][:300]
            raise RequestError(f"{structured.field}: {reason}")
        return compiled

    def _tokens(self, field: str) -> Any:
        """Return llguidance's table of tokens, made at the first call."""
        with self._reading:
            if self._vocabulary is None:
                self._vocabulary = self._read_vocabulary(field)
            return self._vocabulary

    def _read_vocabulary(self, field: str) -> Any:
        import llguidance

        tokenizer: Any = self._tokenizer
        table = None if tokenizer is None else TokenBytes.of(tokenizer, False)
        if table is None:
            reason = "there is no tokenizer" if tokenizer is None else "the text of a token depends on others"
            raise RequestError(f"{field}: not available with this tokenizer: {reason}")
        size = len(tokenizer or ()) if self._size is None else self._size
        vocabulary = _Vocabulary(tokenizer, table, size)
        self._table = table
        # Some tokenizers drop the space of the first token of a text; such tokens are left out there.
        self._shifting = [token for token in range(size) if table.of_token(token, True) != vocabulary.tokens[token]]
        return llguidance.LLTokenizer(vocabulary)  # type: ignore[arg-type]


class Matcher:
    """State of one answer under a constraint: which tokens may be next.

    Args:
        compiled: llguidance's matcher, for this answer alone.
        field: name of the request's field in errors.
        barred: tokens that cannot be the first.
    """

    def __init__(self, compiled: Any, field: str, barred: Sequence[int] = ()) -> None:
        self._compiled, self._field, self._barred = compiled, field, barred

    def copy(self) -> Matcher:
        """Return a matcher in the same state, which goes on independently."""
        return Matcher(self._compiled.deep_copy(), self._field, self._barred)

    @property
    def accepting(self) -> bool:
        """Whether the text may end here."""
        return self._compiled.is_accepting()

    @property
    def complete(self) -> bool:
        """Whether the text has to end here, since nothing can follow."""
        return self._compiled.is_stopped() and not self._compiled.is_error()

    def valid(self, tokens: Sequence[int], ends: Collection[int] = ()) -> int:
        """Return how many of the `tokens` may follow one after the other; an end token in `ends` is the last."""
        count = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
        if self._barred and count and tokens[0] in self._barred:
            return 0
        return self._compiled.validate_tokens(list(tokens[:count]))

    def mask(self, scores: torch.Tensor, ends: Collection[int]) -> None:
        """Set the scores of tokens that cannot be next to minus infinity, in place.

        Args:
            scores: fp32 [vocabulary], on the CPU.
            ends: end tokens, which are possible where the text may end and nowhere else.

        Raises:
            RequestError: no token is possible, or the state is too complex.
        """
        bits = numpy.frombuffer(self._compiled.compute_bitmask(), dtype=numpy.uint8)
        self._check()
        values = scores.numpy()
        possible = numpy.unpackbits(bits, bitorder="little")[: len(values)].view(bool)
        possible[[token for token in (*ends, *self._barred) if token < len(values)]] = False
        allowed_ends = [token for token in ends if token < len(values)] if self.accepting else []
        possible[allowed_ends] = True
        numpy.copyto(values, -numpy.inf, where=~possible)
        if values.max() == -numpy.inf:
            raise RequestError(f"{self._field}: no token of this vocabulary can go on here")

    def accept(self, token: int) -> None:
        """Go on by a token that is not an end token; raises RequestError if it cannot be next."""
        self._barred = ()
        if not self._compiled.consume_token(token):
            self._check()
            raise RequestError(f"{self._field}: token {token} cannot be next")

    def rollback(self, count: int) -> None:
        """Take back the last `count` accepted tokens."""
        self._compiled.rollback(count)

    def _check(self) -> None:
        if self._compiled.is_error():
            raise RequestError(f"{self._field}: {self._compiled.get_error().partition(chr(10))[0][:300]}")
