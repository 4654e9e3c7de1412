import org.zeromq.ZMQ;

/** Asks an endpoint by JeroMQ: each line of standard input is frames in hex, each reply one line of the same. */
public class JeromqClient {
    public static void main(String[] arguments) throws Exception {
        ZMQ.Context context = ZMQ.context(1);
        ZMQ.Socket socket = context.socket(arguments[1].equals("REQ") ? ZMQ.REQ : ZMQ.DEALER);
        socket.connect(arguments[0]);
        java.io.BufferedReader lines = new java.io.BufferedReader(new java.io.InputStreamReader(System.in));
        for (String line = lines.readLine(); line != null; line = lines.readLine()) {
            String[] frames = line.split(",", -1);
            for (int index = 0; index < frames.length; index++) {
                byte[] frame = new byte[frames[index].length() / 2];
                for (int at = 0; at < frame.length; at++) {
                    frame[at] = (byte) Integer.parseInt(frames[index].substring(2 * at, 2 * at + 2), 16);
                }
                socket.send(frame, index + 1 < frames.length ? ZMQ.SNDMORE : 0);
            }
            StringBuilder reply = new StringBuilder();
            do {
                for (byte each : socket.recv(0)) {
                    reply.append(String.format("%02x", each));
                }
                reply.append(socket.hasReceiveMore() ? "," : "");
            } while (socket.hasReceiveMore());
            System.out.println(reply);
        }
        socket.close();
        context.term();
    }
}
