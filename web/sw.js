// Serves the files of one build of this page, with their policy in HTTP headers. Refuses all other requests.
const FILES = {{files}};
const SHELL = {{shell}};
const VERSION = "ckptconv {{version}}";

async function answer(name) {
  const cache = await caches.open(VERSION);
  const kept = await cache.match(name);
  if (kept) return kept;
  const { integrity, headers } = FILES[name];
  const got = await fetch(name, { integrity, cache: "no-cache", credentials: "omit" });
  if (!got.ok) return got;
  const mine = new Response(await got.arrayBuffer(), { headers });
  await cache.put(name, mine.clone());
  return mine;
}

self.addEventListener("install", (event) => event.waitUntil(Promise.all(SHELL.map(answer))));

self.addEventListener("activate", (event) =>
  event.waitUntil((async () => {
    for (const name of await caches.keys()) if (name.startsWith("ckptconv ") && name !== VERSION) await caches.delete(name);
    await self.clients.claim();
  })()));

self.addEventListener("fetch", (event) => {
  const { method, mode, url } = event.request;
  const scope = self.registration.scope;
  const asked = mode === "navigate" ? url.replace(/[?#].*/, "") : url; // a link to the page can contain a query or fragment
  const name = asked.startsWith(scope) ? asked.slice(scope.length) || "index.html" : "";
  const known = method === "GET" && Object.hasOwn(FILES, name);
  event.respondWith(known ? answer(name) : Promise.resolve(Response.error()));
});
