"""What the server answers with status 400."""

from __future__ import annotations


class Refused(ValueError):
    """The request cannot be carried out; the message is the answer."""
