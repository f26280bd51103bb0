"""Eight virtual CPU devices for the whole suite, so that sharding is tested anywhere; set before jax starts."""

import os

COUNT = "--xla_force_host_platform_device_count"
if COUNT not in os.environ.get("XLA_FLAGS", ""):
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {COUNT}=8".strip()
