"""How calls of the Open Inference Protocol are treated."""

from dataclasses import replace

from dragoman.inference import inference_pb2
from dragoman.server.faces.grpc.methods import PROBE, QUESTION, REQUEST, Methods, declared
from dragoman.server.faces.oip.reading import infer_reader

INFERENCE = inference_pb2.DESCRIPTOR.services_by_name["GRPCInferenceService"]
_INFER = replace(REQUEST, reader=infer_reader)
# The first three say no more than health does, which needs no caller either.
OPEN_INFERENCE_METHODS: Methods = declared(
    INFERENCE, QUESTION, ServerLive=PROBE, ServerReady=PROBE, ModelReady=PROBE, ModelInfer=_INFER, ModelStreamInfer=_INFER
)
