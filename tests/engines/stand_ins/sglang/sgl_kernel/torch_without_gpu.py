"""Makes torch's streams, events and pinned memory into no-ops.

SGLang's disaggregation and its HiCache order their copies with them. On a CPU every copy has happened when the call returns, so there is nothing to
order.
"""

import torch


class Event:
    def __init__(self, *_args, **_kwargs):
        pass

    def record(self, *_args):
        pass

    def wait(self, *_args):
        pass

    def synchronize(self):
        pass

    def query(self) -> bool:
        return True

    def elapsed_time(self, _other) -> float:
        return 0.0


class Stream:
    """A stream, and the context in which a stream is current."""

    def __init__(self, *_args, **_kwargs):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_error):
        return False

    def wait_event(self, _event):
        pass

    def wait_stream(self, _stream):
        pass

    def record_event(self, event=None):
        return event or Event()

    def synchronize(self):
        pass

    def query(self) -> bool:
        return True


class CudaRuntime:
    """Registers memory with a driver that is not there; 0 is success."""

    def cudaHostRegister(self, *_args) -> int:
        return 0

    def cudaHostUnregister(self, *_args) -> int:
        return 0


def _without_pinning(create):
    def created(*args, pin_memory=None, **kwargs):
        return create(*args, **kwargs)

    return created


def install() -> None:
    if torch.cuda.is_available():
        return
    for device in (torch.cuda, torch.cpu):
        device.Event = Event
        device.Stream = Stream
        device.stream = Stream
        device.StreamContext = Stream
        device.current_stream = Stream
    torch.cuda.cudart = CudaRuntime
    torch.cuda.synchronize = lambda *_args: None
    for name in ("empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, _without_pinning(getattr(torch, name)))
    torch.Tensor.pin_memory = lambda tensor, *_args: tensor
    torch.Tensor.record_stream = lambda *_args: None
