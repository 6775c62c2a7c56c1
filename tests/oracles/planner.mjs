// planner.mjs PAGE - reads command lines, one a line, and prints what the planner inside of the page says of
//                    each: the plan as JSON on one line, or "refused: " and its message.
import {readFileSync} from 'node:fs';
const page = readFileSync(process.argv[2], 'utf8');
const code = Buffer.from(page.match(/id='wasm'>([^<]*)</)[1], 'base64');
const planner = new WebAssembly.Instance(new WebAssembly.Module(code)).exports;
const read = (at, size) => new TextDecoder().decode(new Uint8Array(planner.memory.buffer, Number(at), size));

function plan(words) {
  const line = new TextEncoder().encode(words + '\0');
  new Uint8Array(planner.memory.buffer, Number(planner.planner_input()), line.length).set(line);
  const failed = planner.planner_plan() ? 1 : 0;
  const text = read(planner.planner_text(failed), planner.planner_bytes(failed));
  return failed ? 'refused: ' + text.trim().replace(/^planner: /, '') : JSON.stringify(JSON.parse(text).plan);
}

for (const line of readFileSync(0, 'utf8').split('\n').filter(line => line)) console.log(plan(line));
