"""Errors as OpenAI's clients expect them."""

from typing import Any


class ApiError(ValueError):
    """A request that is refused.

    Args:
        message: what is wrong and what to change.
        status: HTTP status.
        param: the field of the request that is at fault.
        code: short name for programs, such as ``context_length_exceeded``.
        kind: OpenAI's error type.
    """

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.kind = kind

    def body(self) -> dict[str, Any]:
        """The JSON body of the response."""
        return {"error": {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}}


class MissingServerPackageError(ImportError):
    """FastAPI or uvicorn is not installed."""
