// Calls the real tool several times in one process, each with a program of its own, and tells how each call ended:
// one JSON line {"code": number, "stdout": text} a call. Arguments: the package, then JSON [[argument, ...], ...].
import path from "node:path";
import { pathToFileURL } from "node:url";

const [, , packageFolder, calls] = process.argv;
const program = pathToFileURL(path.join(packageFolder, "dist/cli/index.js")).href;
const [waiting, tell] = [JSON.parse(calls).entries(), process.stdout.write.bind(process.stdout)];
let told = "";
process.stdout.write = (text) => ((told += text), true);

async function next(index, words) {
  process.argv = [process.argv[0], path.join(packageFolder, "bin/openspec.js"), ...words];
  process.exitCode = undefined;
  (await import(`${program}?call=${index}`)).runCli();
}

let began = false;
// Emitted when nothing is left to do: a call has ended.
process.on("beforeExit", () => {
  if (began) tell(JSON.stringify({ code: process.exitCode ?? 0, stdout: told }) + "\n");
  [began, told] = [true, ""];
  const call = waiting.next();
  if (call.done) process.exitCode = 0;
  else next(...call.value);
  if (call.done) began = false;
});
