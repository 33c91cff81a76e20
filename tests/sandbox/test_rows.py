"""Test cases from the rows of known data sets."""

import json

import pytest

from qerl.sandbox.cases import AssertCase, StdioCase
from qerl.sandbox.rows import RowError, cases_of, question_of

TWO = (StdioCase("1", "a"), StdioCase("2", "b"))


@pytest.mark.parametrize(
    ("row", "cases"),
    [
        ({"input": ["1", "2"], "output": ["a", "b"]}, TWO),
        ({"inputs": ["1", "2"], "outputs": ["a", "b"]}, TWO),
        ({"input": "1", "output": "a"}, TWO[:1]),
        ({"outputs": ["a"]}, (StdioCase("", "a"),)),
        ({"inputs": [["1", "2"]], "outputs": [["a", 3]]}, (StdioCase("1\n2\n", "a\n3\n"),)),
        ({"official_tests": [{"input": "1", "output": "a"}, {"input": "2", "output": "b"}]}, TWO),
        ({"public_tests": {"input": ["1"], "output": ["a"]}, "private_tests": {"input": ["2"], "output": ["b"]}}, TWO),
        ({"examples": [{"input": "9", "output": "z"}], "input": ["1", "2"], "output": ["a", "b"]}, TWO),
        ({"examples": [{"input": "1", "output": "a"}], "official_tests": []}, TWO[:1]),
        ({"input_output": json.dumps({"inputs": ["1", "2"], "outputs": ["a", "b"]})}, TWO),
        ({"tests": json.dumps([{"input": "1", "output": "a", "type": "stdin_stdout"}])}, TWO[:1]),
        ({"tests": json.dumps({"inputs": ["1", "2"], "outputs": ["a", "b"]})}, TWO),
        ({"output": "0.5", "tolerance": 1e-6}, (StdioCase("", "0.5", 1e-6),)),
        ({"test_list": ["assert f()"], "test_setup_code": "import re"}, (AssertCase("assert f()", "import re"),)),
        (
            {"test_list": ["assert f()"], "test_imports": ["import a", "import b"]},
            (AssertCase("assert f()", "import a\nimport b"),),
        ),
        ({"tests": "assert f()", "code": "def f(): ..."}, (AssertCase("assert f()"),)),
        ({"tests": ["assert f()", "assert g()"]}, (AssertCase("assert f()"), AssertCase("assert g()"))),
        (
            {"prompt": "def f():\n", "test": "def check(c): assert c()", "entry_point": "f"},
            (AssertCase("def check(c): assert c()\n\ncheck(f)", "def f():\n"),),
        ),
    ],
)
def test_cases(row, cases):
    assert cases_of(row) == cases


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"question": "x"}, "no test cases"),
        ({"input": [], "output": []}, "no test cases"),
        ({"input": ["1", "2"], "output": ["a"]}, "2 of input but 1 of output"),
        ({"input_output": '{"fn_name": "f", "inputs": [[1]], "outputs": [1]}'}, "calls the function 'f'"),
        ({"input_output": "{"}, "not JSON"),
        ({"tests": "[1"}, "test cases: not JSON"),
        ({"tests": [{"input": "1", "output": "a", "testtype": "functional"}]}, "cases of type 'functional'"),
        ({"output": "a", "interaction_format": "Talk."}, "interactive"),
        ({"output": "a", "generated_checker": "import sys"}, "takes a checker program"),
        ({"output": "a", "input_mode": "file"}, "input_mode='file'; only standard input and output"),
        ({"tests": [3]}, "a int where an object"),
        ({"test": "x", "entry_point": "f); import os; (f"}, "is not a name"),
    ],
)
def test_rows_without_cases(row, message):
    with pytest.raises(RowError, match=message):
        cases_of(row)


def test_only_the_first_cases():
    row = {"input": list("123"), "output": list("abc")}
    assert cases_of(row, max_cases=2) == TWO
    assert cases_of(row, max_cases=9, tolerance=0.1)[2] == StdioCase("3", "c", 0.1)


def test_question():
    assert question_of({"text": " T ", "prompt": ""}) == "T"
    assert question_of({"prompt": "P", "body": "B"}, "body") == "B"
    row = {"text": "T", "test_list": ["assert 1", "assert 2"]}
    assert question_of(row, show_tests=1) == "T\n\nThe code must pass:\nassert 1"
    with pytest.raises(RowError, match="no text in body"):
        question_of({"prompt": "P"}, "body")
