// The Sweep page: the form on the left, what it found on the right. Needs sweep_form.js and
// sweep_results.js.
const results = new SweepResults(async (name, number_) => {
  const picked = await server.settings({ name, number: number_ });
  if (!picked || picked.error) results.complain(picked?.error);
  else trigger("use", picked);
});
const form = new SweepForm(async (asked) => {
  form.starter.disabled = true;
  const started = await server.start(asked);
  form.starter.disabled = false;
  if (!started || started.error) form.complain(started?.error);
  else await results.list(started.name);
});
element.querySelector(".sweep").append(form.host, results.host);
form.fill();
const linked = new URL(location.href).searchParams.get("sweep");
results.list(linked, Boolean(linked));
// Fresh whenever the page comes into view: a tab switch, the window's return.
new IntersectionObserver((entries) => {
  if (entries.some((entry) => entry.isIntersecting)) results.poll();
}).observe(element);
document.addEventListener("visibilitychange", () => { if (!document.hidden) results.poll(); });
watch("value", () => { if (props.value?.open) results.list(props.value.open, true); });
