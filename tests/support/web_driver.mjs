// Uses the page as a person would: node web_driver.mjs chrome|firefox PROGRAM URL JOBS, in a folder with puppeteer-core.
// JOBS is a JSON file: lists of the files to choose, and what to fill in. Prints what came of each, as JSON.
import fs from "node:fs";
import { createRequire } from "node:module";
import path from "node:path";

const { default: puppeteer } = await import(createRequire(path.resolve("here.js")).resolve("puppeteer-core"));
const [kind, executablePath, url, jobs] = process.argv.slice(2);
const usual = puppeteer.defaultArgs({ browser: kind, headless: true, args: kind === "chrome" ? ["--no-sandbox", "--disable-gpu"] : [] });
const args = usual.map((each) => each.replace(",IsolateSandboxedIframes", "")); // frames are as users have them
const browser = await puppeteer.launch({ browser: kind, executablePath, args, ignoreDefaultArgs: kind === "chrome", headless: true });
const results = [];
try {
  const page = await browser.newPage(), said = [];
  page.on("console", (message) => said.push(message.text()));
  await page.evaluateOnNewDocument(() => { // it saves by downloading
    delete globalThis.showSaveFilePicker;
    delete globalThis.showDirectoryPicker;
  });
  await page.goto(url);
  const done = () => page.waitForFunction(() => /^(Ready|Choose another)/.test(document.getElementById("state").textContent), { timeout: 120_000 });
  const begin = () => page.$eval("#state", (state) => { state.textContent = "waiting"; });
  for (const { files, fields } of JSON.parse(fs.readFileSync(jobs, "utf8"))) {
    await begin();
    await (await page.$("#choose")).uploadFile(...files);
    await done();
    await (await (await page.$("#inside")).contentFrame()).waitForSelector(".map div"); // the map is drawn, for each file
    await begin();
    await page.evaluate((given) => {
      for (const [name, value] of Object.entries(given)) {
        const field = document.querySelector("#edits [name=" + name + "]");
        if (value === true) field.checked = true;
        else field.value = value;
      }
      document.getElementById("prepare").click();
    }, fields);
    await done();
    results.push(await page.evaluate(async () => { // what would be downloaded
      const text = (id) => document.getElementById(id).textContent;
      const made = new Promise((resolve) => { URL.createObjectURL = (blob) => (resolve(blob), "blob:none"); });
      HTMLAnchorElement.prototype.click = () => {};
      if (document.getElementById("planned").hidden) return { error: text("error") };
      document.getElementById("save").click();
      const sum = new Uint8Array(await crypto.subtle.digest("SHA-256", await (await made).arrayBuffer()));
      return { command: text("command"), sum: [...sum].map((byte) => byte.toString(16).padStart(2, "0")).join("") };
    }));
  }
  const before = [...said]; // Chromium says what it blocks
  const planted = await page.evaluate(() => Promise.all(["https://127.0.0.1:9/", "index.html?data", "data:,"].map((each) => fetch(each).then(() => "sent", () => "blocked"))));
  const promise = await page.$eval("#promise", (element) => element.textContent);
  console.log(JSON.stringify({ version: await browser.version(), results, planted, promise, said: before }));
} finally {
  await browser.close();
}
