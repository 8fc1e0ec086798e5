// Calls a Dragoman server in every way and prints a line of JSON for each: node client.js HOST:PORT MODEL PROTOS
// PROTOS is the folder that has dragoman/v1/generation.proto. The blocks that docs/call.md shows are these.
'use strict';

const [address, model, protos] = process.argv.slice(2);

const grpc = require('@grpc/grpc-js');
const protoLoader = require('@grpc/proto-loader');

// Fields keep the contract's names; a seed has 64 bits, more than a number holds; `outcome` tells which field of a oneof is set.
const options = { includeDirs: [protos], keepCase: true, longs: String, enums: String, defaults: true, oneofs: true };
const definition = protoLoader.loadSync('dragoman/v1/generation.proto', options);
const { Generation } = grpc.loadPackageDefinition(definition).dragoman.v1;
const client = new Generation(address, grpc.credentials.createInsecure());
const inOneMinute = () => ({ deadline: Date.now() + 60_000 });

function generate(request) {
  return new Promise((resolve, reject) => {
    client.Generate(request, inOneMinute(), (error, response) => (error ? reject(error) : resolve(response)));
  });
}

async function stream(request, onText) {
  let result = null;
  for await (const message of client.GenerateStream(request, inOneMinute())) {
    onText(message.text);
    result = message.result ?? result;
  }
  return result;
}

async function batch(requests, onOutcome) {
  const call = client.GenerateBatch(inOneMinute());
  for (const request of requests) call.write(request); // each with a `request_id` of its own
  call.end();
  for await (const { request_id, outcome, response, error } of call) onOutcome(request_id, outcome === 'error' ? error : response);
}

// The Error of a failed call, as in a batch; a call that did not reach the server has only a status.
function reason(error) {
  const [status] = error.metadata?.get('grpc-status-details-bin') ?? [];
  return status ? definition['dragoman.v1.Error'].deserialize(status) : { code: error.code, message: error.details };
}

const print = (call, outcome) => console.log(JSON.stringify({ call, outcome }));

async function main() {
  const text = 'A dog runs through the snow.';
  print('generate', await generate({ model, text, num_beams: 3, num_return_sequences: 2, return_log_probs: true }));
  print('sample', await generate({ model, text, do_sample: true, seed: '18446744073709551615' }));

  const pieces = [];
  const result = await stream({ model, text }, (piece) => pieces.push(piece));
  print('stream', { pieces, result });

  const outcomes = {};
  const requests = [
    { request_id: 'good', model, text },
    { request_id: 'bad', model, text, num_beams: 1000 },
    { request_id: 'also good', model, text: 'Two men are talking.' },
  ];
  await batch(requests, (id, outcome) => (outcomes[id] = outcome));
  print('batch', outcomes);

  const failure = await generate({ model: 'en-xx', text, request_id: 'node-1' }).catch((error) => error);
  print('failure', { name: grpc.status[failure.code], ...reason(failure) });

  // More at once than the server takes, each of them long.
  const crowd = Array.from({ length: 32 }, () => generate({ model, text, min_new_tokens: 150, max_new_tokens: 200 }));
  const refused = (await Promise.allSettled(crowd)).filter(({ status }) => status === 'rejected');
  print('crowd', refused.map((refusal) => reason(refusal.reason)));
  client.close();

  const nobody = new Generation('127.0.0.1:1', grpc.credentials.createInsecure());
  nobody.Generate({ model, text }, inOneMinute(), (error) => {
    print('nobody', reason(error));
    nobody.close();
  });
}

main().catch((error) => {
  console.error(error);
  process.exit(1);
});
