// Builds dist/iris.js, one ES module with everything in it, and the types beside it unless --module-only is given.
import { execFileSync } from "node:child_process";
import { readFileSync } from "node:fs";
import { fileURLToPath } from "node:url";
import { gzipSync } from "node:zlib";
import { build } from "esbuild";

const here = fileURLToPath(new URL(".", import.meta.url));
await build({
  absWorkingDir: here,
  entryPoints: ["src/index.ts"],
  outfile: "dist/iris.js",
  bundle: true,
  format: "esm",
  target: "es2024",
  minify: true,
  lineLimit: 500, // Node prints the whole line of an error that nobody catches
  keepNames: false,
  sourcemap: "linked",
  legalComments: "inline",
  logLevel: "warning",
});
if (!process.argv.includes("--module-only")) {
  const compiler = `${here}node_modules/typescript/bin/tsc`;
  execFileSync(process.execPath, [compiler, "-p", `${here}tsconfig.types.json`], { stdio: "inherit" });
}
const bytes = readFileSync(`${here}dist/iris.js`);
console.log(`dist/iris.js: ${bytes.length} bytes, ${gzipSync(bytes).length} with gzip`);
