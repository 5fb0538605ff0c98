/** Call a function of the user; what it raises is logged, because no caller of ours could handle it. */
export function notify<T>(callback: (argument: T) => unknown, argument: T): void {
  try {
    callback(argument);
  } catch (error) {
    console.error("iris: a callback raised", error);
  }
}
