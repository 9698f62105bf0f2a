"""Fields of requests that constrain the text of an answer: OpenAI's, vLLM's, and vLLM's older ones."""

from __future__ import annotations

import json
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from deepspeed.errors import RequestError
from deepspeed.inference.structured_output import StructuredOutput

GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


class JsonSchemaFormat(BaseModel):
    """`json_schema` of a response format. `strict` changes nothing: every schema is enforced."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str | None = None
    description: str | None = None
    schema_: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: bool | None = None


class ResponseFormat(BaseModel):
    """`response_format`: any text, a JSON object, or JSON by a schema."""

    model_config = ConfigDict(extra="forbid", strict=True)
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class StructuredOutputsField(BaseModel):
    """`structured_outputs` of vLLM: exactly one of the fields."""

    model_config = ConfigDict(extra="forbid", strict=True)
    json_: dict[str, Any] | str | bool | None = Field(None, alias="json")
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class ConstrainedRequest(BaseModel):
    """Fields of both kinds of requests that constrain the answer."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputsField | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None

    def structured(self) -> StructuredOutput | None:
        """Return the constraint; None: any text.

        Raises:
            RequestError: several constraints, or an invalid one; the message begins with the field and a colon.
        """
        stated = self._stated()
        if len(stated) > 1:
            raise RequestError(f"{stated[1][0]}: an answer has one constraint, and there is {stated[0][0]} too")
        return StructuredOutput(*stated[0][1:], field=stated[0][0]) if stated else None

    def _stated(self) -> list[tuple[str, str, Any]]:
        """Return (field, kind, value) of each constraint in the request."""
        stated: list[tuple[str, str, Any]] = []
        wanted = self.response_format
        if wanted is not None and wanted.type == "json_object":
            stated.append(("response_format", "json_object", ""))
        elif wanted is not None and wanted.type == "json_schema":
            if wanted.json_schema is None or wanted.json_schema.schema_ is None:
                raise RequestError("response_format: json_schema has no schema")
            stated.append(("response_format", "json_schema", json.dumps(wanted.json_schema.schema_)))
        options = self.structured_outputs
        fields = [] if options is None else [(name.rstrip("_"), value) for name, value in options]
        if fields and all(value in (None, False) for _, value in fields):
            raise RequestError("structured_outputs: one of json, regex, choice, grammar and json_object")
        entries = [("structured_outputs", name, value) for name, value in fields]
        entries += [(field, name, getattr(self, field)) for field, name in GUIDED.items()]
        for field, name, value in entries:
            if value is None or (name == "json_object" and not value):
                continue
            if name == "json":
                value = value if isinstance(value, str) else json.dumps(value)
                stated.append((field, "json_schema", value))
            else:
                value = tuple(value) if isinstance(value, list) else "" if value is True else value
                stated.append((field, name, value))
        return stated
