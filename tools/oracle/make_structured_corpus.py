# SPDX-License-Identifier: Apache-2.0
"""Makes tests/text/corpus/structured/json_schema.json: JSON schemas, and texts
with the verdict of the Python package jsonschema on each.

A text is valid if it is JSON, has the properties in the schema's order (which
llguidance demands of what it writes: an object's text has one order), and
jsonschema takes it. Where llguidance is stricter than JSON Schema by design,
no text is listed.

Usage: python tools/oracle/make_structured_corpus.py, with jsonschema 4.26
"""

import json
import pathlib

from jsonschema import Draft202012Validator, FormatChecker

ROOT = pathlib.Path(__file__).resolve().parents[2]
OUT = ROOT / "tests/text/corpus/structured/json_schema.json"

POINT = {
    "type": "object",
    "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
    "required": ["x", "y"],
    "additionalProperties": False,
}
TREE = {
    "$ref": "#/$defs/node",
    "$defs": {
        "node": {
            "type": "object",
            "properties": {
                "value": {"type": "integer"},
                "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
            },
            "required": ["value", "next"],
            "additionalProperties": False,
        }
    },
}

# Schema, and texts: of some good, of some bad.
CASES = [
    (True, ["1", "null", '{"a": [1, 2.5e3, "x"]}', "[]", "tru", "", "{", '"a']),
    ({"type": "object"}, ["{}", '{"a": 1}', '{"a": {"b": []}}', "[]", "1", '{"a"}']),
    ({"type": "string"}, ['""', '"a\\n\\u0007é"', '"a', "a", '"\\x"', "1"]),
    ({"type": "integer"}, ["0", "-7", "123456789", "1.5", "01", "-", '"1"', "+1"]),
    ({"type": "number"}, ["0.5", "-1e-7", "3", ".5", "1.", "1e", "NaN"]),
    ({"type": "boolean"}, ["true", "false", "True", "1", "null"]),
    ({"type": "null"}, ["null", "nul", "0"]),
    ({"type": ["string", "null"]}, ['"a"', "null", "1", "[]"]),
    ({"type": "array"}, ["[]", '[1, "a", []]', "{}", "[1,]", "[1"]),
    ({"enum": ["red", "green", 3, None]}, ['"red"', "3", "null", '"re"', '"blue"', "4"]),
    ({"const": "é\n"}, ['"é\\n"', '"e"', '""']),
    ({"const": {"a": [1, True]}}, ['{"a": [1, true]}', '{"a": [1, false]}', "{}"]),
    (POINT, ['{"x": 1, "y": 2}', '{"x":1,"y":2}', '{"x": 1}', '{"x": 1, "y": 2, "z": 3}',
             '{"x": "1", "y": 2}', "{}"]),
    ({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}},
      "additionalProperties": False},
     ["{}", '{"a": 1}', '{"b": "x"}', '{"a": 1, "b": "x"}', '{"c": 1}', '{"a": null}']),
    ({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
     ['{"a": 1}', '{"a": 1, "more": [2]}', '{"more": 1}', "{}", '{"a": "x"}']),
    ({"type": "object", "additionalProperties": {"type": "integer"}},
     ["{}", '{"a": 1, "b": 2}', '{"a": "x"}', '{"a": 1, "b": null}']),
    ({"type": "object", "patternProperties": {"^n_[a-z]+$": {"type": "integer"}},
      "additionalProperties": False},
     ['{"n_a": 1}', '{"n_a": 1, "n_b": 2}', '{"n_a": "x"}', '{"m": 1}', "{}"]),
    ({"type": "array", "items": {"type": "integer"}},
     ["[]", "[1]", "[1, 2, 3]", '[1, "a"]', "[null]", "[1.5]"]),
    ({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 3},
     ["[1, 2]", "[1,2,3]", "[1]", "[1,2,3,4]", "[]"]),
    ({"type": "array", "prefixItems": [{"type": "string"}, {"type": "integer"}], "items": False,
      "minItems": 2},
     ['["a", 1]', '["a"]', '["a", 1, 2]', '[1, "a"]']),
    ({"type": "array", "items": {"enum": ["a", "b"]}}, ['["a", "b", "a"]', '["c"]', '["a", "ab"]']),
    ({"type": "string", "minLength": 2, "maxLength": 4},
     ['"ab"', '"abcd"', '"éé"', '"a"', '"abcde"', '""']),
    ({"type": "string", "pattern": "^[A-Z]{2}-[0-9]+$"}, ['"AB-1"', '"AB-"', '"ab-1"', '"xAB-1"']),
    ({"type": "string", "pattern": "b+"}, ['"abbc"', '"b"', '"ac"', '""']),
    ({"type": "string", "format": "date"}, ['"2024-02-29"', '"2024-13-01"', '"yesterday"', '""']),
    ({"type": "string", "format": "uuid"},
     ['"123e4567-e89b-12d3-a456-426614174000"', '"123e4567"', '"x"']),
    ({"type": "string", "format": "ipv4"}, ['"127.0.0.1"', '"256.0.0.1"', '"1.2.3"']),
    ({"type": "string", "format": "email"}, ['"a@example.org"', '"nobody"']),
    ({"type": "integer", "minimum": 3, "maximum": 120},
     ["3", "120", "99", "2", "121", "-5", "1000"]),
    ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 10}, ["1", "9", "0", "10"]),
    ({"type": "integer", "minimum": -5}, ["-5", "0", "77777", "-6", "-50"]),
    ({"type": "number", "minimum": 0, "maximum": 1}, ["0", "1", "0.25", "1.1", "-0.5", "2"]),
    ({"type": "integer", "multipleOf": 5}, ["0", "15", "-20", "7", "12"]),
    ({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 1}]},
     ["5", '"a"', '"ab"', "null", "5.5"]),
    ({"oneOf": [{"type": "integer"}, {"type": "boolean"}]}, ["5", "true", '"5"', "null"]),
    ({"allOf": [{"type": "integer"}, {"minimum": 5}, {"maximum": 9}]}, ["5", "9", "4", "10", '"5"']),
    ({"allOf": [
        {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
        {"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}]},
     ['{"a": 1, "b": "x"}', '{"a": 1}', '{"b": "x"}', '{"a": "1", "b": "x"}']),
    (TREE, ['{"value": 1, "next": null}', '{"value": 1, "next": {"value": 2, "next": null}}',
            '{"value": 1}', '{"value": 1, "next": 2}', '{"value": 1, "next": {"value": 2}}']),
    ({"type": "object", "properties": {"p": POINT, "name": {"type": "string"}},
      "required": ["p", "name"], "additionalProperties": False},
     ['{"p": {"x": 1, "y": 2}, "name": "a"}', '{"p": {"x": 1}, "name": "a"}',
      '{"p": {"x": 1, "y": 2}}', '{"p": null, "name": "a"}']),
    ({"type": "array", "items": POINT, "minItems": 1},
     ['[{"x": 1, "y": 2}]', '[{"x": 1, "y": 2}, {"x": 3, "y": 4}]', "[]", '[{"x": 1}]']),
    ({"type": "object", "properties": {"kind": {"const": "circle"}, "r": {"type": "number"}},
      "required": ["kind", "r"], "additionalProperties": False},
     ['{"kind": "circle", "r": 1.5}', '{"kind": "square", "r": 1}', '{"kind": "circle"}']),
    ({"type": "object", "properties": {"a\"b": {"type": "null"}}, "required": ["a\"b"],
      "additionalProperties": False},
     ['{"a\\"b": null}', '{"ab": null}']),
    ({"type": "object", "minProperties": 1, "additionalProperties": {"type": "integer"}},
     ['{"a": 1}', '{"a": 1, "b": 2}', "{}"]),
]


def is_valid(schema, text):
    try:
        instance = json.loads(text, parse_constant=lambda name: 1 / 0)
    except (ValueError, ZeroDivisionError):
        return False
    return Draft202012Validator(schema, format_checker=FormatChecker()).is_valid(instance)


def main():
    schemas = [
        {
            "schema": schema,
            "texts": [{"text": text, "valid": is_valid(schema, text)} for text in texts],
        }
        for schema, texts in CASES
    ]
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(
        json.dumps(
            {"made_by": "tools/oracle/make_structured_corpus.py", "schemas": schemas},
            ensure_ascii=False,
            indent=1,
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
