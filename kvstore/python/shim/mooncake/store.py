"""`moongate_store` under the name that engines import."""

from moongate_store import *  # noqa: F403
