"""What Triton's extensions of the protocol have and this server does not offer: why, as callers are told."""

ON_ADMIN_PORT = "operators load and unload models with dragoman.v1.Repository, where admin_port or http_admin gives it"
NO_SHARED_MEMORY = "shared memory is not offered; send the content of tensors with them"
NO_SETTINGS = "settings of traces and logs are the server's own, and do not change while it runs"
