"""Namespace of `mooncake.store`. Other modules of Mooncake, such as `mooncake.engine`, are found beside it if they are installed elsewhere."""

from pkgutil import extend_path

__path__ = extend_path(__path__, __name__)
