// The request on the page as calls to copy: curl, grpcurl and Python. A token is never written into one.
import { copy, element, tell } from "./element.js";

const quote = (text) => `'${text.replaceAll("'", "'\\''")}'`;
const snake = (name) => name.replace(/[A-Z]/gu, (letter) => `_${letter.toLowerCase()}`);

function grpcAddress() {
  const port = document.querySelector('meta[name="grpc-port"]').content;
  return `${location.hostname}:${port}`;
}

const isSecure = () => location.protocol === "https:";

function curl(request, hasToken) {
  const token = hasToken ? ` \\\n  -H "Authorization: Bearer $DRAGOMAN_TOKEN"` : "";
  const path = quote(`${location.origin}/v1/generate:stream`);
  return `curl -N ${path} \\\n  -H 'Content-Type: application/json'${token} \\\n  -d ${quote(JSON.stringify(request))}`;
}

function grpcurl(request, hasToken) {
  const token = hasToken ? ` \\\n  -H "authorization: Bearer $DRAGOMAN_TOKEN"` : "";
  const plain = isSecure() ? "" : " -plaintext";
  return `grpcurl${plain}${token} \\\n  -d ${quote(JSON.stringify(request))} \\\n  ${grpcAddress()} dragoman.v1.Generation/GenerateStream`;
}

// JSON's texts are Python's; a seed is a text in JSON, as are all numbers of 64 bits.
function literal(name, value) {
  if (value === true || value === false) return value ? "True" : "False";
  return name === "seed" ? String(value) : JSON.stringify(value);
}

function python(request, hasToken) {
  const { text, ...options } = request;
  const said = Object.entries(options).map(([name, value]) => `        ${snake(name)}=${literal(name, value)},\n`);
  const imports = (hasToken ? "import os\n\n" : "") + (isSecure() ? "import grpc\n" : "") + "from dragoman import Client\n";
  const extra = (isSecure() ? ", credentials=grpc.ssl_channel_credentials()" : "") + (hasToken ? ', token=os.environ["DRAGOMAN_TOKEN"]' : "");
  return `${imports}\nwith Client("${grpcAddress()}"${extra}) as client:\n    pieces = client.stream(\n        ${JSON.stringify(text)},\n`
    + `${said.join("")}    )\n    for piece in pieces:\n        print(piece.text, end="", flush=True)\n`;
}

export class Calls {
  #blocks;

  constructor(room) {
    this.#blocks = [["curl", curl], ["gRPC", grpcurl], ["Python", python]].map(([name, write]) => {
      const code = element("code");
      const button = element("button", { type: "button", class: "quiet", "aria-label": `Copy ${name}` }, "Copy");
      button.addEventListener("click", () => copy(code, button));
      room.append(element("details", { class: "call", "data-call": name }, element("summary", {}, name),
        element("div", { class: "code" }, element("pre", { tabindex: "0", role: "region", "aria-label": name }, code), button)));
      return { code, write };
    });
  }

  /** Show a request, a GenerateRequest as JSON has it. */
  show(request, hasToken) {
    for (const { code, write } of this.#blocks) tell(code, write(request, hasToken));
  }
}
