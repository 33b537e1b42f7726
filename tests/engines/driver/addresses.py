"""Where everything of a run listens, in a network of its own."""

HOST = "127.0.0.1"
PREFILL_PORT, DECODE_PORT, BOOTSTRAP_PORT = 8100, 8200, 8998
MASTER_PORT, MASTER_HTTP_PORT = 51051, 19003
# An engine's KV events; a replay is asked for ten ports above.
PREFILL_EVENTS_PORT, DECODE_EVENTS_PORT = 5561, 5562
GATEWAY_PORT, GATEWAY_ADMIN_PORT = 30000, 30001
# The second engine's sidecar is at the next port.
SIDECAR_PORT = 9400

PREFILL = f"http://{HOST}:{PREFILL_PORT}"
DECODE = f"http://{HOST}:{DECODE_PORT}"
GATEWAY = f"http://{HOST}:{GATEWAY_PORT}"
GATEWAY_ADMIN = f"http://{HOST}:{GATEWAY_ADMIN_PORT}"
MASTER_HTTP = f"http://{HOST}:{MASTER_HTTP_PORT}"
