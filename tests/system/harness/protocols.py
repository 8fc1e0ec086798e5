"""Every protocol of the server; a new one is added here and has its column in docs/http.md's table."""

from tests.system.harness.grpc_client import NativeGrpc
from tests.system.harness.http_client import NativeHttp
from tests.system.harness.libretranslate_client import LibreTranslate
from tests.system.harness.openinference_grpc_client import OpenInferenceGrpc
from tests.system.harness.openinference_rest_client import OpenInferenceRest
from tests.system.harness.protocol import ProtocolClient

PROTOCOLS: tuple[type[ProtocolClient], ...] = (NativeGrpc, OpenInferenceGrpc, NativeHttp, OpenInferenceRest, LibreTranslate)
