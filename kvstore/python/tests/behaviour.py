"""Behaviour of the module that Mooncake's does not have: forks, errors instead of crashes, the GIL, the shim.

behaviour.py MASTER
"""

import ctypes
import os
import subprocess
import sys
import threading
import time
import unittest

import moongate_store
from moongate_store import MooncakeDistributedStore, ReplicateConfig

MASTER = sys.argv.pop(1)
MIB = 1 << 20


def opened(segment=64 * MIB):
    store = MooncakeDistributedStore()
    assert store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 0, "tcp", "", MASTER) == 0
    return store


class Forks(unittest.TestCase):
    def child(self, work):
        """The result of work in a forked process, which must end soon."""
        reader, writer = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                result = work()
            except BaseException as error:  # noqa: BLE001
                result = f"{type(error).__name__}: {error}"
            os.write(writer, str(result).encode())
            os._exit(0)
        os.close(writer)
        limit = threading.Timer(20, os.kill, (pid, 9))
        limit.start()
        with open(reader, "rb") as pipe:
            text = pipe.read().decode()
        os.waitpid(pid, 0)
        limit.cancel()
        return text

    def test_a_child_gets_an_error_for_every_call(self):
        store = opened()
        self.assertEqual(store.put("fork", b"x"), 0)
        for work in (
            lambda: store.get("fork"),
            lambda: store.put("fork2", b"x"),
            lambda: store.batch_is_exist(["fork"]),
            lambda: store.register_buffer(4096, 10),
            lambda: store.get_hostname(),
        ):
            text = self.child(work)
            self.assertIn("RuntimeError: this store was set up in process", text)
            self.assertIn("call setup there", text)
        self.assertEqual(store.get("fork"), b"x")
        store.close()

    def test_a_child_may_close_or_drop_a_store_of_its_parent(self):
        store = opened()
        holder = [store]
        self.assertEqual(store.put("kept", b"x"), 0)
        self.assertEqual(self.child(store.close), "0")
        self.assertEqual(self.child(holder.clear), "None")
        self.assertEqual(store.get("kept"), b"x")
        self.assertEqual(store.close(), 0)

    def test_a_child_sets_up_a_store_of_its_own(self):
        store = opened()
        self.assertEqual(store.put("shared", b"x"), 0)
        self.assertEqual(self.child(lambda: (own := opened(0)).get("shared") + str(own.close()).encode()), "b'x0'")
        store.close()


class Errors(unittest.TestCase):
    def test_calls_without_a_store_have_codes(self):
        for store in (MooncakeDistributedStore(), opened(0)):
            store.close()
            self.assertEqual(store.put("a", b"x"), -600)
            self.assertEqual(store.get("a"), b"")
            self.assertIsNone(store.get_buffer("a"))
            self.assertEqual(store.batch_get_buffer(["a", "b"]), [None, None])
            self.assertEqual(store.is_exist("a"), -600)
            self.assertEqual(store.batch_is_exist(["a", "b"]), [-600, -600])
            self.assertEqual(store.batch_put_from(["a"], [4096], [1]), [-600])
            self.assertEqual(store.batch_get_into_multi_buffers(["a"], [[4096]], [[1]]), [-600])
            self.assertEqual(store.register_buffer(4096, 1), -600)
            self.assertEqual(store.remove_all(), -600)
            self.assertEqual(store.health_check(), 1)
            self.assertEqual(store.get_hostname(), "")
            self.assertEqual(store.close(), 0)

    def test_unregistered_memory_is_never_touched(self):
        store = opened()
        for address in (1, 4096, 2**63):
            self.assertEqual(store.put_from("wild", address, 100), -600)
            self.assertEqual(store.get_into("wild", address, 100), -600)
            self.assertEqual(store.batch_put_from_multi_buffers(["wild"], [[address, address]], [[1, 1]]), [-600])
        store.close()

    def test_a_master_that_does_not_answer_fails_setup(self):
        # Mooncake's module takes two minutes for the same code.
        for segment in (0, 64 * MIB):
            self.assertEqual(MooncakeDistributedStore().setup("127.0.0.1", "P2PHANDSHAKE", segment, 0, "tcp", "", "127.0.0.1:1"), -1)

    def test_an_unknown_protocol_fails_setup(self):
        # With the code of Mooncake's module, which takes 22 s for it.
        self.assertEqual(MooncakeDistributedStore().setup("127.0.0.1", "P2PHANDSHAKE", 0, 0, "pigeon", "", MASTER), -1)

    def test_the_dummy_client_names_the_alternative(self):
        with self.assertRaisesRegex(NotImplementedError, "moongate store.*global_segment_size=0"):
            MooncakeDistributedStore().setup_dummy(MIB, MIB, "127.0.0.1:50052")

    def test_a_buffer_handle_is_writable_memory(self):
        store = opened()
        self.assertEqual(store.put("handle", b"0123456789"), 0)
        handle = store.get_buffer("handle")
        self.assertEqual((handle.size(), ctypes.string_at(handle.ptr(), 10)), (10, b"0123456789"))
        self.assertEqual((memoryview(handle)[2:4].tobytes(), memoryview(handle).format), (b"23", "B"))
        store.close()


class Concurrency(unittest.TestCase):
    def test_other_threads_run_during_a_call(self):
        store = opened()
        memory = (ctypes.c_char * (48 * MIB))()
        address = ctypes.addressof(memory)
        self.assertEqual(store.register_buffer(address, len(memory)), 0)
        turns, done = [0], threading.Event()

        def count():
            while not done.is_set():
                turns[0] += 1
                time.sleep(0)

        counter = threading.Thread(target=count)
        counter.start()
        before = turns[0]
        self.assertEqual(store.put_from("long", address, len(memory)), 0)
        during = turns[0] - before
        done.set()
        counter.join()
        self.assertGreater(during, 10)
        store.close()

    def test_closing_waits_for_no_other_thread(self):
        store = opened()
        stop = threading.Event()
        failures = []

        def work():
            while not stop.is_set():
                try:
                    store.put("k", b"x" * 1000)
                    store.get("k")
                except Exception as error:  # noqa: BLE001
                    failures.append(error)

        workers = [threading.Thread(target=work) for _ in range(4)]
        for worker in workers:
            worker.start()
        time.sleep(0.2)
        self.assertEqual(store.close(), 0)
        stop.set()
        for worker in workers:
            worker.join(20)
            self.assertFalse(worker.is_alive())
        self.assertEqual(failures, [])


class Module(unittest.TestCase):
    def test_the_shim_has_the_same_classes(self):
        from mooncake import store

        self.assertIs(store.MooncakeDistributedStore, MooncakeDistributedStore)
        self.assertIs(store.ReplicateConfig, ReplicateConfig)
        self.assertIs(store.bind_to_numa_node, moongate_store.bind_to_numa_node)

    def test_a_missing_call_names_the_alternative(self):
        store = MooncakeDistributedStore()
        self.assertFalse(hasattr(store, "batch_put_session_start"))
        with self.assertRaisesRegex(AttributeError, "batch_put_from_multi_buffers"):
            store.batch_put_session_start
        with self.assertRaisesRegex(AttributeError, "MooncakeHostMemAllocator"):
            moongate_store.BufferPool
        with self.assertRaisesRegex(AttributeError, "^MooncakeDistributedStore has no 'nonsense'$"):
            store.nonsense

    def test_a_process_that_ends_unmounts_its_segment(self):
        store = opened(0)
        program = (
            "from moongate_store import *\n"
            "store = MooncakeDistributedStore()\n"
            f"assert store.setup('127.0.0.1', 'P2PHANDSHAKE', {64 * MIB}, 0, 'tcp', '', {MASTER!r}) == 0\n"
            "config = ReplicateConfig()\n"
            "config.preferred_segment = store.get_hostname()\n"
            "assert store.put('gone', b'x', config) == 0\n"
        )
        subprocess.run([sys.executable, "-c", program], check=True, timeout=60)
        self.assertEqual(store.is_exist("gone"), 0)
        store.close()


if __name__ == "__main__":
    unittest.main(verbosity=1)
