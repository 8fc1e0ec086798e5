"""What Triton's extensions of the protocol have and this server does not offer: why, as callers are told."""

ON_ADMIN_PORT = "operators load and unload models, at admin_port over gRPC, and here with http_admin over HTTP"
NO_SHARED_MEMORY = "shared memory is not offered; send the content of tensors with them"
NO_SETTINGS = "settings of traces and logs are the server's own, and do not change while it runs"
