"""Runs inside the sandbox, as the main program: a candidate's code, then tests of it, then a token.

Standard input holds 8 digits n, then n bytes of JSON ``{"setup", "source"}``, then JSON ``{"test", "token"}``. The
token is written to standard output only after the last statement of the test, so a candidate that exits early, from
its top level or from within a tested function, has not passed. Test and token stay unread until the candidate's top
level is done, and its own output goes to standard error.

A test has to call the candidate within this process. A program that knows this file could look for the token among
the descriptors, and a result can lie about its equality (``__eq__``): tests with output on a pipe have no such gap.
"""

import json
import os
import sys
import traceback
import types


def _read(descriptor: int, size: int) -> bytes:
    """``size`` bytes, fewer at the end."""
    data = bytearray()
    while len(data) < size:
        chunk = os.read(descriptor, min(size - len(data), 1 << 16))
        if not chunk:
            break
        data += chunk
    return bytes(data)


def _detach() -> tuple[int, int]:
    """Descriptors of the real input and output; 0 is empty from now on and 1 goes where 2 goes."""
    real_in, real_out = os.dup(0), os.dup(1)
    empty = os.open(os.devnull, os.O_RDONLY)
    os.dup2(empty, 0)
    os.close(empty)
    os.dup2(2, 1)
    return real_in, real_out


def main() -> None:
    """Exit status 0 with the token: passed. 0 without: an assertion failed. Otherwise as Python says."""
    candidate = json.loads(_read(0, int(_read(0, 8))))
    real_in, real_out = _detach()
    try:
        code = compile(candidate["source"], "solution.py", "exec", dont_inherit=True)
    except SyntaxError as error:
        # without the header of a traceback, as the interpreter reports a file that it cannot compile
        sys.stderr.write("".join(traceback.format_exception_only(error)))
        sys.exit(1)
    module = types.ModuleType("solution")
    # dataclasses, pickle and typing look modules up by name
    sys.modules["solution"] = module
    exec(candidate["setup"], module.__dict__)
    exec(code, module.__dict__)
    final = json.loads(_read(real_in, 1 << 30))
    try:
        exec(compile(final["test"], "test.py", "exec", dont_inherit=True), module.__dict__)
    except AssertionError:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(0)
    os.write(real_out, final["token"].encode("ascii"))
    # no exit handlers: they are the candidate's
    os._exit(0)


if __name__ == "__main__":
    main()
