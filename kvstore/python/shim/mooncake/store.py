"""`moongate_store` under the name that engines import."""

from moongate_store import *  # noqa: F403
from moongate_store import __getattr__  # noqa: F401
