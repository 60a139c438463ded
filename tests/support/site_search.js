// node site_search.js WORKER INDEX < QUESTIONS: the pages that the site's search finds for each
// question, best first, as JSON. WORKER is the script that answers in a browser; here it runs in a
// context whose messages are calls.
const fs = require("fs");
const vm = require("vm");

const [worker, index] = process.argv.slice(2);
const SETUP = 0;
const QUERY = 2;
let receive;
let reply;
const scope = { console: { ...console, warn() {} } };
scope.self = scope;
scope.addEventListener = (name, listener) => { receive = listener; };
scope.postMessage = (message) => { reply = message; };
vm.createContext(scope);
vm.runInContext(fs.readFileSync(worker, "utf8"), scope);

async function main() {
  const data = JSON.parse(fs.readFileSync(index, "utf8"));
  await receive({ data: { type: SETUP, data: { ...data, options: { suggest: false } } } });
  const answers = {};
  for (const question of JSON.parse(fs.readFileSync(0, "utf8"))) {
    await receive({ data: { type: QUERY, data: question } });
    const pages = reply.data.items.map((group) => group[0].location.split("#")[0]);
    answers[question] = [...new Set(pages)];
  }
  console.log(JSON.stringify(answers));
}

main();
