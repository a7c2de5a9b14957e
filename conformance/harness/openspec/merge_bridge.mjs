// Applies deltas with the real tool's own merge: one JSON request a line in, one JSON answer a line out.
// Request: {"base": text or null, "delta": text}. Answer: {"text": ...} or {"refused": message}.
import { mkdtemp, mkdir, realpath, rm, writeFile } from "node:fs/promises";
import { tmpdir } from "node:os";
import path from "node:path";
import { createInterface } from "node:readline";
import { pathToFileURL } from "node:url";

const [, , packageFolder, capability, change] = process.argv;
const { buildUpdatedSpec } = await import(pathToFileURL(path.join(packageFolder, "dist/core/specs-apply.js")));

const folder = await realpath(await mkdtemp(path.join(tmpdir(), "merge-bridge-")));
const [sourceRoot, targetRoot] = [path.join(folder, "delta"), path.join(folder, "specs")];
const [source, target] = [sourceRoot, targetRoot].map((root) => path.join(root, capability, "spec.md"));
for (const file of [source, target]) await mkdir(path.dirname(file), { recursive: true });

for await (const line of createInterface({ input: process.stdin })) {
  const { base, delta } = JSON.parse(line);
  await writeFile(source, delta);
  await (base === null ? rm(target, { force: true }) : writeFile(target, base));
  const update = { id: capability, sourceRoot, source, targetRoot, target, exists: base !== null };
  let answer;
  try {
    answer = { text: (await buildUpdatedSpec(update, change, { silent: true })).rebuilt };
  } catch (error) {
    answer = { refused: error.message };
  }
  process.stdout.write(JSON.stringify(answer) + "\n");
}
await rm(folder, { recursive: true });
